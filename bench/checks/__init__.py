"""Checks of what must not change, on real servers."""
