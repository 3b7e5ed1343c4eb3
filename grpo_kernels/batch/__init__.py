"""The tokens that count, of padded and packed batches, and of sequences that ranks share."""
