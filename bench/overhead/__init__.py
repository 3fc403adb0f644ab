"""What scheduling and prediction cost a server."""
