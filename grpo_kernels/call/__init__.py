"""Check the arguments of a public call, compare them between ranks, and make the `Request` that an engine serves."""
