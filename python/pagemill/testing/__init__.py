"""Helpers for tests of programs that use Pagemill: an oracle and batches."""
