"""A model that guesses how urgent a prompt is.

Doors: `head` (UrgencyHead) and the command in `command`.
"""
