"""The head of a call: a weight or a module, with adapters and hooks, or this rank's part of it."""
