"""Past answers on disk: records, their file, and the lock of its folder.

Doors: `store` (Store, and where it is), `file` (Record, StoreError) and `lock` (who has a store).
"""
