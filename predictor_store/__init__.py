"""From a prompt to the distribution of its output length, from the lengths of similar prompts."""
