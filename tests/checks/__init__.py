"""Checks that are run by hand, from a checkout."""
