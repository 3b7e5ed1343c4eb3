"""Random calls, seeded and shrunk by hypothesis: `make fuzz`."""
