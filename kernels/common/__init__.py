"""What the Pallas kernels share."""
