"""The only code that imports SGLang, registered as an SGLang plugin."""
