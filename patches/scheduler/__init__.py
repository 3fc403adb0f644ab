"""Hooks in a scheduler process: order, admission, preemption, and what they need to know."""
