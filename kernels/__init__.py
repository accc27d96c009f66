"""Attention ops and their TPU kernels."""
