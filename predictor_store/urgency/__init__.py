"""Guesses how urgent a prompt is, by a learned model.

Import from `head` (UrgencyHead) and the command in `command`.
"""
