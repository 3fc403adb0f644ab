"""A scheduler process. Its door is hooks.py; state.py has what we keep there."""
