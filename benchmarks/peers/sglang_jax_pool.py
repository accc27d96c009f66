"""SGLang-JAX's paged allocator: its own code, without its device pool."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.stubs import Stub, stubbed

_MODULE = "sgl_jax.srt.mem_cache.allocator"

# Theirs, loaded on first use: not there when this module is read.
Allocator = Any


@functools.cache
def load() -> Any:
    """Its allocator module; ModuleNotFoundError if it is not there."""
    with stubbed(("sgl_jax",), real=(_MODULE,)):
        return importlib.import_module(_MODULE)


def make_allocator(num_pages: int, page_size: int) -> Allocator:
    """An allocator of num_pages; page 0, its dummy, is not among them."""
    allocator = load().PagedTokenToKVPoolAllocator
    return allocator(num_pages * page_size, page_size, kvcache=Stub())


def alloc(allocator: Allocator, num_tokens: int) -> NDArray[np.int32] | None:
    """Allocates a new request's prompt.

    Returns:
        Its token slots, page * page_size + offset; None if there are too few.
    """
    slots: NDArray[np.int32] | None = allocator.alloc_extend(
        prefix_lens=[0],
        seq_lens=[num_tokens],
        last_loc=[-1],
        extend_num_tokens=num_tokens,
    )
    return slots


def free(allocator: Allocator, slots: NDArray[np.int32]) -> None:
    """Gives a request's slots, and so their pages, back."""
    allocator.free(slots)


def num_free_tokens(allocator: Allocator) -> int:
    """How many token slots are free."""
    return int(allocator.available_size())
