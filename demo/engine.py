"""The loop: admit, plan, validate, write KV, attend, check, finish."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pagemill
from pagemill.testing import oracle

from demo.scheduler import Running, Scheduler
from demo.traces import Request
from demo.values import ModelShape

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
_CHECKED_QUERIES = 16


@dataclasses.dataclass(frozen=True)
class Options:
    """What the loop runs; defaults fit a laptop."""

    model: ModelShape = dataclasses.field(default_factory=ModelShape)
    dtype: str = "float32"
    total_num_pages: int = 4096
    page_size: int = 16
    max_num_tokens: int = 512
    max_num_seqs: int = 32
    pages_per_seq: int = 2048
    sliding_window: int | None = None
    soft_cap: float | None = None
    implementation: Any = None
    checks_per_step: int = 2
    peer: str | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One line of the table."""

    step: int
    sequences: int
    tokens: int
    pages: int
    plan_us: float
    validate_us: float
    attention_ms: float
    checks: int
    failed: int
    max_error: float
    peer_ms: float | None = None


class Engine:
    """Owns the pool, the KV pages and the compiled step."""

    def __init__(self, requests: list[Request], options: Options) -> None:
        self.options = options
        model = options.model
        self.pool = pagemill.PagePool(
            options.total_num_pages, options.page_size
        )
        planner = pagemill.Planner(
            self.pool,
            max_num_tokens=options.max_num_tokens,
            max_num_seqs=options.max_num_seqs,
            pages_per_seq=options.pages_per_seq,
        )
        self.scheduler = Scheduler(
            self.pool, planner, collections.deque(requests)
        )
        self.kv_pages = jnp.full(
            (
                options.total_num_pages,
                options.page_size,
                2 * model.num_kv_heads,
                model.head_dim,
            ),
            jnp.nan,  # A page read before it was written poisons the result.
            options.dtype,
        )
        self.attend = self._compile(options.implementation)
        self.peer = options.peer and self._compile(options.peer)
        self.rng = np.random.default_rng(0)
        self.failures: list[str] = []

    def run(self, steps: int) -> Iterator[Step]:
        """Runs up to ``steps`` steps; fewer when the trace is served."""
        self._warm_up()
        for number in range(steps):
            if self.scheduler.done:
                break
            yield self._step(number)
        self.scheduler.close_all()
        self.pool.audit()
        if self.pool.num_free_pages != self.pool.total_num_pages:
            self.failures.append("pages are missing after all were closed")

    def _compile(self, implementation: Any) -> Any:
        options = self.options

        def attend(
            q: jax.Array,
            kv_pages: jax.Array,
            batch: pagemill.RaggedBatch,
            k: jax.Array,
            v: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            return pagemill.ragged_paged_attention(
                q,
                kv_pages,
                batch,
                k=k,
                v=v,
                sliding_window=options.sliding_window,
                soft_cap=options.soft_cap,
                implementation=implementation,
            )

        return jax.jit(attend, donate_argnums=1)

    def _warm_up(self) -> None:
        """Compiles on an idle step, so that no step's time includes it."""
        batch = self.scheduler.planner.plan([])
        q, k, v = (self._buffer(kind, []) for kind in "qkv")
        for attend in filter(None, (self.attend, self.peer)):
            _, self.kv_pages = attend(q, self.kv_pages, batch, k, v)

    def _step(self, number: int) -> Step:
        work, batch = self.scheduler.plan()
        planned = time.perf_counter()
        self._validate(batch, number)
        validated = time.perf_counter()
        q, k, v = (self._buffer(kind, work) for kind in "qkv")
        out, attention = self._timed(self.attend, q, batch, k, v)
        peer = None
        if self.peer:
            _, peer = self._timed(self.peer, q, batch, k, v)
        pages = self.pool.total_num_pages - self.pool.num_free_pages
        errors = self._check(np.asarray(out), q, batch, work)
        self.scheduler.finish(work)
        limit = TOLERANCE[self.options.dtype]
        return Step(
            step=number,
            sequences=len(work),
            tokens=sum(count for _, count in work),
            pages=pages,
            plan_us=self.scheduler.plan_seconds * 1e6,
            validate_us=(validated - planned) * 1e6,
            attention_ms=attention * 1e3,
            checks=len(errors),
            failed=sum(not error <= limit for error in errors),
            max_error=max(errors, default=0.0),
            peer_ms=None if peer is None else peer * 1e3,
        )

    def _validate(self, batch: pagemill.RaggedBatch, number: int) -> None:
        try:
            pagemill.validate(batch)
        except pagemill.PagemillError as error:
            self.failures.append(f"step {number}: {error}")

    def _timed(
        self, attend: Any, q: Any, batch: pagemill.RaggedBatch, k: Any, v: Any
    ) -> tuple[jax.Array, float]:
        start = time.perf_counter()
        out, self.kv_pages = attend(q, self.kv_pages, batch, k, v)
        jax.block_until_ready((out, self.kv_pages))
        return out, time.perf_counter() - start

    def _buffer(
        self, kind: str, work: list[tuple[Running, int]]
    ) -> np.ndarray[Any, Any]:
        """The step's tokens in the batch's order; the tail is NaN."""
        model = self.options.model
        shape = (model.heads(kind), model.head_dim)
        buffer = np.full(
            (self.options.max_num_tokens, *shape), np.nan, np.float32
        )
        row = 0
        for running, count in work:
            end = running.seq.length
            buffer[row : row + count] = model.tokens(
                kind, running.request.number, end - count, end
            )
            row += count
        return buffer.astype(jnp.dtype(self.options.dtype))

    def _check(
        self,
        out: np.ndarray[Any, Any],
        q: np.ndarray[Any, Any],
        batch: pagemill.RaggedBatch,
        work: list[tuple[Running, int]],
    ) -> list[float]:
        """Largest error of each sampled sequence; dead rows must be 0."""
        total = int(batch.cu_q_lens[-1])
        errors = [float(np.abs(out[total:].astype(np.float64)).sum())]
        count = min(self.options.checks_per_step, len(work))
        for row in self.rng.choice(len(work), count, replace=False):
            running, q_len = work[row]
            end = int(batch.cu_q_lens[row]) + q_len
            last = int(self.rng.integers(0, q_len))  # queries left out behind
            first = max(q_len - last - _CHECKED_QUERIES, 0)
            rows = slice(end - q_len + first, end - last)
            seen = running.seq.length - last
            errors.append(
                self._error(out[rows], q[rows], running.request.number, seen)
            )
        return errors

    def _error(
        self,
        out: np.ndarray[Any, Any],
        q: np.ndarray[Any, Any],
        request: int,
        length: int,
    ) -> float:
        """Against float64 attention over keys and values made anew."""
        model, options = self.options.model, self.options
        k, v = (
            model.tokens(kind, request, 0, length)
            .astype(jnp.dtype(options.dtype))
            .astype(np.float64)
            for kind in "kv"
        )
        expected = oracle.dense_attention(
            q.astype(np.float64),
            k,
            v,
            sm_scale=model.head_dim**-0.5,
            causal=True,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
        )
        error = np.abs(out.astype(np.float64) - expected).max()
        return float(error) if np.isfinite(error) else float("inf")
