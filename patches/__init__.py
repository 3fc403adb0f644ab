"""The only code that touches SGLang: hooks, what they need, and what operators run beside a server.

In front: plugin (what is hooked when), hook, compat (releases), refusals, and what travels between
processes (carrier, messages).
"""
