"""Hooks in the HTTP process: predictions, claims, refusals, settings and dispatch."""
