"""The prediction worker: its process, its sockets and its messages."""
