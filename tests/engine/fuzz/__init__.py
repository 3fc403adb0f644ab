"""A seeded scenario fuzzer for real servers: `python -m tests.engine.fuzz --help`."""
