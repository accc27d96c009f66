// BatchView: a ragged batch's metadata as plain pointers, owned by the caller.
//
// Letters: S max_num_seqs, P pages_per_seq, N total_num_pages, T
// max_num_tokens. Rows at and past num_seqs are dead and may hold anything, as
// are a live row's page slots at and past ceil(kv_len / page_size) and, with a
// sliding window, those that no query of this step or later looks into.
#ifndef PAGEMILL_CSRC_CORE_BATCH_VIEW_H_
#define PAGEMILL_CSRC_CORE_BATCH_VIEW_H_

#include <cstdint>

namespace pagemill {

struct BatchView {
  const int32_t* kv_lens = nullptr;       // [S], this step's tokens included
  const int32_t* page_indices = nullptr;  // [S, P], row-major
  const int32_t* cu_q_lens = nullptr;     // [S + 1]
  const int32_t* distribution = nullptr;  // [3], or null when there is none
  const int32_t* slot_mapping = nullptr;  // [T], or null when there is none
  int64_t num_seqs = 0;

  int64_t max_num_seqs = 0;
  int64_t pages_per_seq = 0;
  int64_t page_size = 0;
  int64_t total_num_pages = 0;
  int64_t max_num_tokens = 0;

  int64_t sliding_window = 0;     // keys seen, own included; 0: all
  int64_t smem_budget_bytes = 0;  // for a kernel's scalar operands; 0: any

  int64_t q_begin(int64_t seq) const { return cu_q_lens[seq]; }
  int64_t q_len(int64_t seq) const {
    return int64_t{cu_q_lens[seq + 1]} - cu_q_lens[seq];
  }
  int64_t kv_len(int64_t seq) const { return kv_lens[seq]; }
  const int32_t* pages(int64_t seq) const {
    return page_indices + seq * pages_per_seq;
  }
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_BATCH_VIEW_H_
