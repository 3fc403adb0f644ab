"""Predictions for many prompts at once, and how good they are."""
