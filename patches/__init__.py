"""The only code that touches SGLang: hooks, what they need, and what operators run beside it."""
