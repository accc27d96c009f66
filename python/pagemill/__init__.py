"""Pagemill: ragged batches for TPU attention, planned and proved in C++.

A :class:`PagePool` holds the pages of a KV cache, a :class:`Planner` writes a
step's metadata as a :class:`RaggedBatch`, :func:`validate` proves it on the
host and :func:`checked` inside a program, and :func:`ragged_paged_attention`
runs it. ``pagemill.inspect``, loaded when it is first used, shows what the
compiler makes of a kernel.
"""

import importlib as _importlib
from typing import Any as _Any

from pagemill._version import __version__ as __version__
from pagemill.batch import RaggedBatch as RaggedBatch
from pagemill.buckets import BucketPlan as BucketPlan
from pagemill.buckets import propose_buckets as propose_buckets
from pagemill.buckets import split_by_budget as split_by_budget
from pagemill.buckets import trace_step_sizes as trace_step_sizes
from pagemill.checking import checked as checked
from pagemill.checking import raise_for_code as raise_for_code
from pagemill.device import DeviceTable as DeviceTable
from pagemill.errors import CapacityError as CapacityError
from pagemill.errors import LeaseError as LeaseError
from pagemill.errors import PagemillError as PagemillError
from pagemill.errors import SpecError as SpecError
from pagemill.errors import UnsupportedError as UnsupportedError
from pagemill.kernels.ragged_paged_attention.api import (
    copy_pages as copy_pages,
)
from pagemill.kernels.ragged_paged_attention.api import (
    ragged_paged_attention as ragged_paged_attention,
)
from pagemill.kernels.ragged_paged_attention.api import (
    update_kv_pages as update_kv_pages,
)
from pagemill.kernels.ragged_paged_attention.states import (
    merge_states as merge_states,
)
from pagemill.kv_cache import KVCacheSpec as KVCacheSpec
from pagemill.kv_cache import KVLayout as KVLayout
from pagemill.layouts import FlatLayout as FlatLayout
from pagemill.layouts import IndptrLayout as IndptrLayout
from pagemill.layouts import RaggedLayout as RaggedLayout
from pagemill.layouts import as_flat as as_flat
from pagemill.layouts import as_indptr as as_indptr
from pagemill.layouts import as_ragged as as_ragged
from pagemill.layouts import from_flat as from_flat
from pagemill.layouts import from_indptr as from_indptr
from pagemill.layouts import from_ragged as from_ragged
from pagemill.params import Tuning as Tuning
from pagemill.planner import Planner as Planner
from pagemill.pool import PagePool as PagePool
from pagemill.pool import PoolStats as PoolStats
from pagemill.pool import Sequence as Sequence
from pagemill.sharded import ShardedBatch as ShardedBatch
from pagemill.sharded import ShardedPlanner as ShardedPlanner
from pagemill.step import Step as Step
from pagemill.validation import CheckCode as CheckCode
from pagemill.validation import validate as validate
from pagemill.work import WorkFlag as WorkFlag
from pagemill.work import WorkList as WorkList
from pagemill.work import work_list as work_list


def __getattr__(name: str) -> _Any:
    if name == "inspect":
        return _importlib.import_module("pagemill.inspect")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
