#include "csrc/core/validate/rules.h"

#include <algorithm>
#include <cstdint>

#include "csrc/core/batch_view.h"

namespace pagemill::internal {

bool SizesHold(const BatchView& b) {
  return IsSize(b.page_size) && IsSize(b.total_num_pages) &&
         IsSize(b.max_num_tokens) &&
         b.total_num_pages * b.page_size <= kInt32Max &&
         b.max_num_seqs * b.pages_per_seq <= kInt32Max && b.num_seqs >= 0 &&
         b.num_seqs <= b.max_num_seqs;
}

bool DistributionHolds(const BatchView& b) {
  const int32_t* d = b.distribution;
  return d == nullptr || (0 <= d[0] && d[0] <= d[1] && d[1] <= d[2] &&
                          int64_t{d[2]} == b.num_seqs);
}

bool CuQLensHold(const BatchView& b) {
  return b.num_seqs == 0 ||
         (b.cu_q_lens[0] == 0 && b.cu_q_lens[b.num_seqs] <= b.max_num_tokens);
}

bool DecodeAndPrefillRowsHold(const BatchView& b) {
  if (b.distribution == nullptr) return true;
  const int64_t decode = b.distribution[0], prefill = b.distribution[1];
  bool bad = false;
  for (int64_t seq = 0; seq < decode; ++seq) bad |= b.q_len(seq) != 1;
  for (int64_t seq = decode; seq < prefill; ++seq) {
    bad |= b.q_len(seq) != b.q_len(decode);
  }
  return !bad;
}

int64_t SmemBytes(const BatchView& b) {
  const auto padded = [](int64_t entries) {
    return (entries + kSmemLanes - 1) / kSmemLanes * kSmemLanes;
  };
  constexpr int64_t kNumSeqs = kSmemLanes;  // or the distribution
  return int64_t{sizeof(int32_t)} *
         (b.max_num_seqs * padded(b.pages_per_seq) + padded(b.max_num_seqs) +
          padded(b.max_num_seqs + 1) + kNumSeqs);
}

bool SmemBudgetHolds(const BatchView& b) {
  return b.smem_budget_bytes <= 0 || SmemBytes(b) <= b.smem_budget_bytes;
}

bool RowTokensHold(const BatchView& b, int64_t seq) {
  const int64_t end = b.cu_q_lens[seq + 1];
  int64_t token = b.cu_q_lens[seq];
  if (token >= end) return true;
  int64_t position = b.kv_len(seq) - (end - token);
  int64_t slot = position / b.page_size;
  int64_t offset = position % b.page_size;
  bool bad = false;
  // Within a page the mapping counts up.
  for (; token < end; ++slot, offset = 0) {
    const int64_t first = b.pages(seq)[slot] * b.page_size + offset;
    const int64_t count = std::min(b.page_size - offset, end - token);
    const int32_t* found = b.slot_mapping + token;
    for (int32_t i = 0; i < static_cast<int32_t>(count); ++i) {
      bad |= found[i] != static_cast<int32_t>(first) + i;
    }
    token += count;
  }
  return !bad;
}

bool DeadTokensHold(const BatchView& b) {
  const int64_t live = b.num_seqs == 0 ? 0 : b.cu_q_lens[b.num_seqs];
  bool bad = false;
  for (int64_t i = live; i < b.max_num_tokens; ++i) {
    bad |= b.slot_mapping[i] != -1;
  }
  return !bad;
}

bool TokensInBuffer(const BatchView& b, int64_t seq) {
  return b.cu_q_lens[seq] >= 0 && b.cu_q_lens[seq + 1] <= b.max_num_tokens;
}

}  // namespace pagemill::internal
