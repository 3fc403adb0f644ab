"""Scheduling of LLM requests by predicted cost. Engine-free: see docs/structure.md."""
