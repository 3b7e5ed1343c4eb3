"""Several processes: divided models, heads, sequences, and ranks that disagree."""
