"""Urgent requests among others, simulated: triage of an emergency department."""
