"""The HTTP process. Start at hooks.py."""
