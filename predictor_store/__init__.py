"""Predicts the distribution of an answer's length from the lengths of answers to similar prompts.

`predict` imports `store`; `service` and `data` import both. `data` imports `logs`, and
`probe` imports no other package. All of them use the modules of this folder.
"""
