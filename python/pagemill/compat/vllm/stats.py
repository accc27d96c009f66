"""What a scheduler reports about prefix reuse, with vLLM's fields."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class PrefixCacheStats:
    """Counts since the last report.

    Attributes:
      reset: whether the cache was reset.
      requests: requests that were looked up and are not counted below.
      queries: their tokens.
      hits: of these, tokens that were found.
      preempted_requests: requests that had been preempted before.
      preempted_queries: their tokens.
      preempted_hits: of these, tokens that were found.
    """

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Counts one request."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits
