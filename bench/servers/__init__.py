"""Real servers: how they are started, what they run on, and who talks to them."""
