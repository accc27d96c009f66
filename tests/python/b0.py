"""The small batch that the validation and op tests start from."""

from __future__ import annotations

from typing import Any

import numpy as np

SIZES = {"page_size": 16, "total_num_pages": 8, "max_num_tokens": 16}


def metadata(**changes: Any) -> dict[str, Any]:
    """Two sequences, one prefilling 8 of 20 tokens, one decoding at 9."""
    return {
        "kv_lens": np.array([20, 9], np.int32),
        "page_indices": np.array([[0, 1], [2, 3]], np.int32),
        "cu_q_lens": np.array([0, 8, 9], np.int32),
        "num_seqs": np.array([2], np.int32),
        **SIZES,
        **changes,
    }


def with_rows(rows: int, **changes: Any) -> dict[str, Any]:
    """The same pages scheme with room for more sequences."""
    base = {
        "page_indices": np.arange(2 * rows, dtype=np.int32).reshape(rows, 2),
        "kv_lens": np.array([20, 9, *[0] * (rows - 2)], np.int32),
        "cu_q_lens": np.array([0, 8, 9, *[9] * (rows - 2)], np.int32),
    }
    return metadata(**base | changes)


def i32(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)
