"""The operators' commands: serve, set, run, explain, the doctor; and shadow mode."""
