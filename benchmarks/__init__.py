"""Benchmarks of outlast and its peers; ``python -m benchmarks --help``. Not part of the wheel."""
