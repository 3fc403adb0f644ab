"""An HTTP process. Its door is hooks.py."""
