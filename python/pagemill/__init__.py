"""Pagemill: ragged batches for TPU attention, planned and proved in C++."""
