"""From a prompt to the distribution of its answer's length."""
