"""The head as the caller passes it: a weight or a module, with adapters and hooks, or this rank's part of it."""
