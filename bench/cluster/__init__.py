"""Dispatchers on many simulated engines."""
