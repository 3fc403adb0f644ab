"""Checks of what must not change."""
