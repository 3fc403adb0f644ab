"""Workloads, the serving comparison on real servers, and the reports."""
