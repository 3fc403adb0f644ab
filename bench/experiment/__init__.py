"""Experiments: workload x arms x loads x seeds x engine, to records, tables and pictures."""
