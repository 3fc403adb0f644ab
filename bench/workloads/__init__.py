"""Prompts, answer lengths and arrival times."""
