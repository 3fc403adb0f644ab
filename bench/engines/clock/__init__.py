"""Runs real servers on a CPU with the step times of a modelled GPU."""
