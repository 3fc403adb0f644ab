"""An operator's own traffic under other policies."""
