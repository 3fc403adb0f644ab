"""What the scheduler is measured with; in this folder, what real and simulated runs share."""
