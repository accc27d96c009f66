"""Pagemill's C++ core."""

from collections.abc import Sequence
import enum
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


class CheckCode(enum.IntEnum):
    """What a violation is about."""

    SIZE = 0
    """page_size, total_num_pages and max_num_tokens are positive"""

    INT32_PRODUCT = 1
    """total_num_pages * page_size and max_num_seqs * pages_per_seq fit int32"""

    NUM_SEQS = 2
    """0 <= num_seqs <= max_num_seqs"""

    DISTRIBUTION = 3
    """0 <= decode <= prefill <= total == num_seqs"""

    CU_Q_LENS_START = 4
    """cu_q_lens starts at 0"""

    CU_Q_LENS_FALLS = 5
    """cu_q_lens never falls"""

    TOTAL_TOKENS = 6
    """cu_q_lens[num_seqs] <= max_num_tokens"""

    KV_LEN_NEGATIVE = 7
    """kv_lens >= 0 in live rows"""

    QUERY_EXCEEDS_KV = 8
    """q_len <= kv_len"""

    ROW_TOO_SHORT = 9
    """ceil(kv_len / page_size) <= pages_per_seq"""

    PAGE_OUT_OF_RANGE = 10
    """page ids of live slots are in [0, total_num_pages)"""

    DECODE_ROW = 11
    """decode rows have q_len 1"""

    PREFILL_ROW = 12
    """prefill rows have one q_len"""

    PAGE_WRITTEN_TWICE = 13
    """a page written this step belongs to one sequence"""

    SHARED_PAGE_WRITTEN = 14
    """pages that others read are not written this step"""

    SLOT_MAPPING = 15
    """
    slot_mapping is page * page_size + offset for live tokens, -1 for dead ones
    """

    SMEM_BUDGET = 16
    """kv_lens, page_indices and cu_q_lens fit the kernel's scalar memory"""

class Level(enum.IntEnum):
    """How much is checked."""

    STRUCTURE = 0
    """Lengths, order, ranges and capacities."""

    FULL = 1
    """Also page ownership, and decode and prefill rows."""

class Violation:
    """One broken rule of a batch's values."""

    @property
    def code(self) -> CheckCode: ...

    @property
    def sequence(self) -> int | None: ...

    @property
    def index(self) -> int | None: ...

    @property
    def value(self) -> int: ...

    @property
    def limit(self) -> int: ...

    @property
    def message(self) -> str: ...

    @property
    def remedy(self) -> str: ...

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __getstate__(self) -> tuple[CheckCode, int, int, int, int, int, int]: ...

    def __setstate__(self, arg: tuple[CheckCode, int, int, int, int, int, int], /) -> None: ...

    def __repr__(self) -> str: ...

class Violations:
    """What a batch breaks, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, arg: int, /) -> Violation: ...

def checks() -> list[tuple[CheckCode, Level, str, str]]:
    """Every check: (code, level, what must hold, what to do otherwise)."""

class HostBatch:
    """A batch's arrays on the host."""

    def __init__(self, kv_lens: object, page_indices: object, cu_q_lens: object, num_seqs: object, distribution: object | None, slot_mapping: object | None, page_size: int, total_num_pages: int, max_num_tokens: int) -> None: ...

    def validate(self, level: int, sliding_window: int, smem_budget_bytes: int) -> Violations | None:
        """All violations of the values now; None when they are valid."""

    def count_pages(self) -> int: ...

    def flat(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def ragged(self, capacity: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]: ...

    def indptr(self, capacity: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]: ...

    def slot_mapping(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def work_list(self, *, q_block: int, kv_block: int, causal: bool, sliding_window: int, max_kv_per_item: int, capacity: int | None) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None, None))], int]: ...

@overload
def format_violations(violations: Violations) -> str:
    """The text that errors show."""

@overload
def format_violations(violations: Sequence[Violation]) -> str: ...

class PagePool:
    """Reference-counted pages."""

    def __init__(self, total_num_pages: int, page_size: int, sliding_windows: Sequence[int], prefix_cache: bool, secret: bytes, max_events: int) -> None: ...

    def open(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], salt: bytes) -> tuple[int, int]: ...

    def probe(self, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], salt: bytes) -> int: ...

    def extend(self, handle: int, tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def close(self, handle: int) -> None: ...

    def fork(self, handle: int) -> int: ...

    def truncate(self, handle: int, length: int) -> None: ...

    def length(self, handle: int) -> int: ...

    def committed_length(self, handle: int) -> int: ...

    def pages(self, handle: int, group: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def preempt(self, handle: int) -> None: ...

    def resume(self, handle: int) -> int: ...

    def begin_swap_out(self, handle: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]: ...

    def end_swap_out(self, handle: int) -> None: ...

    def swap_in(self, handle: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]: ...

    def take_page_copies(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]: ...

    def reference_count(self, page: int) -> int: ...

    def state(self, page: int) -> int:
        """The page's state, as the place of its name in stats()."""

    def stats(self) -> dict[str, int]: ...

    def clear_cache(self) -> int: ...

    def take_events(self) -> tuple[list[tuple[int, int, bytes]], int]: ...

    def audit(self) -> None: ...

    @property
    def total_num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_groups(self) -> int: ...

    @property
    def num_free_pages(self) -> int: ...

    @property
    def num_available_pages(self) -> int: ...

    @property
    def num_sequences(self) -> int: ...

class BlockPool:
    """Pages for callers with tables and hashes of their own."""

    def __init__(self, num_blocks: int, caching: bool, log_evictions: bool) -> None: ...

    def take(self, count: int) -> list[int]: ...

    def share(self, blocks: Sequence[int]) -> None: ...

    def release(self, blocks: Sequence[int]) -> None: ...

    def references(self, block: int) -> int: ...

    def count_released(self, blocks: Sequence[int]) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def audit(self) -> None: ...

    def publish(self, blocks: Sequence[int], hashes: list[bytes], num_tokens: Sequence[int], group: int) -> None: ...

    def find(self, hash: bytes, groups: Sequence[int]) -> list[int] | None: ...

    def find_prefix(self, hashes: object, limit: int, groups: Sequence[int]) -> list[list[int]]: ...

    def forget(self, blocks: Sequence[int]) -> None: ...

    def reset(self) -> bool: ...

    def take_evicted(self) -> list[bytes]: ...

    def hash_of(self, block: int) -> bytes | None: ...

    def num_tokens_of(self, block: int) -> int | None: ...

class Planner:
    """Writes the metadata of a step."""

    def __init__(self, pool: PagePool, max_num_tokens: int, max_num_seqs: int, pages_per_seq: int, ring: int, token_buckets: Sequence[int], seq_buckets: Sequence[int], prefill_chunk: int, keep_rows: bool, track_delta: bool) -> None: ...

    def step(self, handles: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def check(self, handles: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], counts: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def commit(self, buffer: int, accepted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None: ...

    def abort(self, buffer: int) -> None: ...

    def retire(self, buffer: int) -> None: ...

    def memory(self, buffer: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]: ...

    def copy(self, buffer: int, max_num_seqs: int, max_num_tokens: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def layout(self, max_num_seqs: int, max_num_tokens: int) -> list[tuple[str, int]]: ...

    def order(self, buffer: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def delta_indices(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

    def delta_pages(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]: ...

def registrations() -> dict[str, object]:
    """XLA FFI handlers by target name."""
