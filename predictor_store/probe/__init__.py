"""Trains probes of hidden states, and reads and writes their files and recordings.

Import from `file` (ProbeFile, and a model's fingerprint), `recording`, and `command`.
"""
