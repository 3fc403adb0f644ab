"""Policies compared on real servers, from the command to the report."""
