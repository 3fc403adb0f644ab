"""Prompts and answers out of data sets, logs and dumps, and the store that they fill.

Doors: `files` (raw rows of anything), `datasets` (prompts and lengths), `server_records` (what
SGLang writes down), `warm` (Observation, and the command) and the command in `store_info`.
"""
