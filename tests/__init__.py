import os

# Threads that share one product wait for each other, and busily, where others want the processor.
# Before anything is imported that reads it; what tests start has it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
