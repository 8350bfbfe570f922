"""Benchmarks: attention written by hand, stock and rewritten, beside the calls that do the same."""
