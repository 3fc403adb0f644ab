"""The only code that touches SGLang: the hooks, their parts, and the operators' commands."""
