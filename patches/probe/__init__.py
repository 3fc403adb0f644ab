"""Reads hidden states inside the model's forward pass, and tells scores to all ranks."""
