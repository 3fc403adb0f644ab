"""Predictors, tested on answered prompts."""
