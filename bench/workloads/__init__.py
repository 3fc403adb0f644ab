"""Makes the requests of experiments: prompts, answer lengths and arrival times."""
