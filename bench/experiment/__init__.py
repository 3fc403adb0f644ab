"""Runs experiments (arms x loads x seeds), and makes records, tables and pictures of them."""
