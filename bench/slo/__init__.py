"""Deadlines and priorities, simulated: ProServe, what is left out of it, and its rivals."""
