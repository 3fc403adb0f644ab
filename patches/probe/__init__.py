"""Reads hidden states of the model for a probe. Start reading at setup.py."""
