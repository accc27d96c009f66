"""A continuous-batching loop over real numbers, checked as it runs."""
