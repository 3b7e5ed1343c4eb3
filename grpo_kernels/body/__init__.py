"""The model below the head: the prefix tree, attention along it, the trial of first use, one forward."""
