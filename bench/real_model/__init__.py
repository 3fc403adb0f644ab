"""Fetches a real language model, and serves it on a CPU."""
