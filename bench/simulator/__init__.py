"""A simulator of SGLang's scheduler that runs the policies themselves."""
