"""Predicts the distribution of an answer's length from the lengths of answers to similar prompts.

Rooms, each of which imports only those before it: `store`, `predict`, then `service` and `data`;
`urgency` imports `data`, `probe` none. All of them share the files beside them.
"""
