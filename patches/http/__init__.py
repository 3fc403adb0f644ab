"""An HTTP process. Its door is hooks.py; replica_watch.py is for the data-parallel controller."""
