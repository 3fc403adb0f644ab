"""Probes of hidden states: recording, training, and the file."""
