"""A real language model on a CPU: its files and its servers."""
