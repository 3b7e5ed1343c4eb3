"""The objective: configuration, formulas, custom losses, metrics."""
