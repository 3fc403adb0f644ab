"""The only code that imports SGLang: one module a hook, registered as an SGLang plugin."""
