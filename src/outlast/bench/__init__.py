"""Benchmarks: what outlast costs and how fast it is, beside its peers in the same run."""
