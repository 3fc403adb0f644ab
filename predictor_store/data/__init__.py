"""Reads prompts and answers from data sets, logs and dumps, and fills a store with them."""
