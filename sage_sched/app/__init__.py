"""Parses the configuration and finds policies by name. The core itself imports none of this."""
