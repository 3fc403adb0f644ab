"""What experiments run on: a simulator, servers on a device clock, and plain servers."""
