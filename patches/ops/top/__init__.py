"""Shows how a running server does, in the terminal or on a page: `sage-sched top`."""
