"""Contains our code in the scheduler process. Start reading at hooks.py; state.py has our state."""
