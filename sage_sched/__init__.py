"""Schedules LLM requests by predicted cost, without an engine (docs/architecture.md)."""
