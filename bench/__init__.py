"""Contains the benchmarks: workloads, a simulator, real servers and experiments."""
