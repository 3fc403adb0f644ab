"""Trains probes of hidden states: their file, recordings to train them on, and the training.

Import from `file` (ProbeFile, and a model's fingerprint), `recording`, and `command`.
"""
