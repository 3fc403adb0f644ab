"""For operators: the doctor, the commands serve, run, set and explain, and shadow mode."""
