"""Contains our own policies, one per file."""
