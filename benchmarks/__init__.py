"""Benchmarks against the programs that people use today."""
