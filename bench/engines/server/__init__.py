"""Starts real servers, and the small models that they serve."""
