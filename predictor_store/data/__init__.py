"""The store of past prompts, filled from logs and data sets, and shown.

Doors: `observations` (prompts and lengths out of files), `warm` and `store_info` (commands).
"""
