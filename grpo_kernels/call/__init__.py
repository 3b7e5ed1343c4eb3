"""From a public call's arguments to what an engine is asked for: checked, planned, alike on all ranks."""
