"""The history of answers on disk."""
