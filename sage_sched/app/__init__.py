"""The edge of the core: configuration, and policies by name. The core imports none of it."""
