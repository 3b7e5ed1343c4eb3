"""Turn a public call's arguments into a `Request` to an engine: check them, compare them over the ranks, plan."""
