"""The only code that imports SGLang: one module a seam, registered as an SGLang plugin."""
