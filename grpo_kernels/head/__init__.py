"""The head as its owner has it: a module, with adapters and hooks, or this rank's part of it."""
