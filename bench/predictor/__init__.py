"""Tests predictors on answered prompts."""
