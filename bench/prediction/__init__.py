"""How good predicted length distributions are, on records in the order of time."""
