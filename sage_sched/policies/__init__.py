"""The policies of the core and of its plainest rivals, one a file."""
