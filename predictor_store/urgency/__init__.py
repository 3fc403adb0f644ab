"""A model that guesses how urgent a prompt is."""
