"""Defines the policies that only comparisons run (sage_sched.app.registry.RIVALS)."""
