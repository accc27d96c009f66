// XLA FFI handler on JAX's CPU platform: proves a batch inside a program.
#ifndef PAGEMILL_CSRC_FFI_CHECKED_H_
#define PAGEMILL_CSRC_FFI_CHECKED_H_

#include "xla/ffi/api/c_api.h"

// Operands num_seqs, kv_lens, page_indices, cu_q_lens, distribution,
// slot_mapping (the last two may have no entries: there is none); result code,
// i32[1]; attributes page_size, total_num_pages, max_num_tokens, full (else the
// structure only).
//
// A valid batch gives code 0.  Another one fails the program with the text of
// FormatViolations.
extern "C" XLA_FFI_Error* PagemillChecked(XLA_FFI_CallFrame* call_frame);

#endif  // PAGEMILL_CSRC_FFI_CHECKED_H_
