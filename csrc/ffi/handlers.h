// XLA FFI handlers for JAX's CPU platform.
#ifndef PAGEMILL_CSRC_FFI_HANDLERS_H_
#define PAGEMILL_CSRC_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

// Operands q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs; result out;
// attributes sm_scale, soft_cap (0: none), sliding_window (0: none), causal.
extern "C" XLA_FFI_Error* PagemillRaggedPagedAttention(
    XLA_FFI_CallFrame* call_frame);

#endif  // PAGEMILL_CSRC_FFI_HANDLERS_H_
