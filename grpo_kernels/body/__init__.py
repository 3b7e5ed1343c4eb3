"""The model below the head: batches in layouts that compute each distinct prefix once."""
