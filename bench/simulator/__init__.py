"""Simulates SGLang's scheduler, in which the policies themselves run."""
