"""Hidden states of the model, read by a probe. Its door is setup.py."""
