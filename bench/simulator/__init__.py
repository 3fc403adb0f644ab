"""A discrete-event simulator of SGLang 0.5.23 that runs the policies that the engine runs."""
