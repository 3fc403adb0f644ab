"""Guesses how urgent a prompt is, by a learned model.

Doors: `head` (UrgencyHead) and the command in `command`.
"""
