"""What the benchmarks compare with: peers' own code, and our best in Python."""
