"""Fills the store of past prompts from logs and data sets, and shows it.

Import from `observations` (prompts and lengths from files), `warm` and `store_info` (commands).
"""
