"""Reads requests from logs and data sets in the field's formats.

Import from `reader` (files to requests), `rows` (raw rows of any file), `request` (LoggedRequest),
`registry` (the formats), `summary` (the first lines of output) and `options` (of commands).
"""
