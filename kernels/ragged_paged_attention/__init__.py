"""Ragged paged attention: spec, reference, TPU kernel and CPU call."""
