"""Requests out of logs and data sets, in the formats that people have.

Doors: `reader` (files to requests, and what was recognised), `rows` (raw rows of any file),
`request` (LoggedRequest), `registry` (the formats) and `options` (of commands that read logs).
"""
