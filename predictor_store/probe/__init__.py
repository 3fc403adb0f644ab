"""Probes of hidden states: their file, recordings to train them on, and the training.

Doors: `file` (ProbeFile), `fingerprint` (of a model), `recording`, and the command in `command`.
"""
