"""Reads hidden states of the model for a probe. Start at setup.py."""
