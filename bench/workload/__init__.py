"""What makes requests: prompts, answer lengths and arrival times."""
