"""What is run by hand, from a checkout: answers that stay the same, ranks that agree, a GPU."""
