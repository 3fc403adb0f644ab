"""What a trace of a server says: `sage-sched explain`."""
