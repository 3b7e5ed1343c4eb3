"""What is made of results: figures, tables, plots, comparisons."""
