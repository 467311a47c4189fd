"""Benchmarks, each run from the project's root as ``python -m benchmarks.<package>.<name>`` (see README.md)."""
