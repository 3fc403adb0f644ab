import os

# Threads that share one matrix product busy-wait for each other, and other processes need the
# cores. It is set before any import that reads it. Processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
