"""Prompts and answers out of data sets and logs, and the store that they fill.

Doors: `files` (raw rows of anything), `datasets` (prompts and lengths), `server_records` (SGLang's
request log), `warm` (Observation, and the command) and the command in `store_info`.
"""
