"""Trains probes of hidden states: their file, recordings to train them on, and the training.

Doors: `file` (ProbeFile, and a model's fingerprint), `recording`, and the command in `command`.
"""
