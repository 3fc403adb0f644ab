"""Engines other than the simulator: real servers, plain or on a device clock."""
