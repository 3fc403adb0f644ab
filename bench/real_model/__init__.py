"""A real language model on a CPU: its files, servers, and its own answers."""
