"""Simulates an operator's own traffic under other policies."""
