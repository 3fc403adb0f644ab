"""The scheduler process. Start at hooks.py; state.py holds our state there."""
