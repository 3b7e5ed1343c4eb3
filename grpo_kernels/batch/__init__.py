"""The tokens that count, of padded and packed batches, and kept sets."""
