"""What another policy would have made of an operator's own traffic."""
