"""The simulator held against real servers, and step times fitted to them."""
