"""Contains our code in the HTTP process. Start reading at hooks.py."""
