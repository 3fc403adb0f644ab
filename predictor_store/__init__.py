"""Predicts the distribution of an answer's length from the lengths of answers to similar prompts.

Each of the packages `store`, `predict`, then `service` and `data`, imports only earlier ones.
`urgency` imports `data`, and `probe` imports none. All of them use the modules of this folder.
"""
