"""The engines: which one serves, what it costs, memory, waits."""
