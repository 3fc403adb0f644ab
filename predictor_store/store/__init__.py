"""Keeps past answers on disk: records, their file, and the lock of its folder.

Import from `store` (Store, and its place), `file` (Record, StoreError) and `lock` (the owner of a
store).
"""
