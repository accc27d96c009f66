// Batches that own their arrays, for tests of the validator.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_TEST_BATCH_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_TEST_BATCH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"

namespace pagemill {

inline constexpr int32_t kPoison = std::numeric_limits<int32_t>::min() + 7;

// A batch that owns its arrays, exactly as large as they must be, so that
// sanitizers see a read past them.
struct Batch {
  std::vector<int32_t> kv_lens, page_indices, cu_q_lens, distribution;
  std::vector<int32_t> slot_mapping;  // empty: none
  int64_t num_seqs = 0;
  int64_t pages_per_seq = 0, page_size = 16, total_num_pages = 0;
  int64_t max_num_tokens = 0;
  int64_t sliding_window = 0, smem_budget_bytes = 0;

  BatchView View() const {
    return {
        .kv_lens = kv_lens.data(),
        .page_indices = page_indices.data(),
        .cu_q_lens = cu_q_lens.data(),
        .distribution = distribution.empty() ? nullptr : distribution.data(),
        .slot_mapping = slot_mapping.empty() ? nullptr : slot_mapping.data(),
        .num_seqs = num_seqs,
        .max_num_seqs = static_cast<int64_t>(kv_lens.size()),
        .pages_per_seq = pages_per_seq,
        .page_size = page_size,
        .total_num_pages = total_num_pages,
        .max_num_tokens = max_num_tokens,
        .sliding_window = sliding_window,
        .smem_budget_bytes = smem_budget_bytes};
  }
  std::vector<Violation> Check(Level level = Level::kFull) const {
    return Validate(View(), level);
  }
  int32_t& page(int64_t seq, int64_t slot) {
    return page_indices[seq * pages_per_seq + slot];
  }
  int32_t page(int64_t seq, int64_t slot) const {
    return page_indices[seq * pages_per_seq + slot];
  }
  int64_t live(int64_t seq) const {
    return (kv_lens[seq] + page_size - 1) / page_size;
  }
};

// A valid batch: shuffled pages, decodes first, everything dead poisoned.
inline Batch Good(std::mt19937& rng, int64_t rows, int64_t live_rows,
                  int64_t width = 4) {
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
  };
  Batch b;
  b.page_size = draw(1, 17);
  b.pages_per_seq = width;
  b.total_num_pages = rows * width;
  b.num_seqs = live_rows;
  b.kv_lens.assign(rows, kPoison);
  b.page_indices.assign(rows * width, kPoison);
  b.cu_q_lens.assign(rows + 1, kPoison);
  b.cu_q_lens[0] = 0;
  std::vector<int32_t> pages(b.total_num_pages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), rng);
  const int32_t decodes = static_cast<int32_t>(draw(0, live_rows));
  size_t next = 0;
  for (int64_t seq = 0; seq < live_rows; ++seq) {
    b.kv_lens[seq] = static_cast<int32_t>(draw(1, width * b.page_size));
    const int64_t q_len = seq < decodes ? 1 : draw(0, b.kv_lens[seq]);
    b.cu_q_lens[seq + 1] = b.cu_q_lens[seq] + static_cast<int32_t>(q_len);
    for (int64_t i = 0; i < b.live(seq); ++i) b.page(seq, i) = pages[next++];
  }
  b.max_num_tokens = b.cu_q_lens[live_rows] + draw(1, 3);
  b.distribution = {decodes, decodes, static_cast<int32_t>(live_rows)};
  return b;
}

inline Batch Small() {
  Batch b;
  b.kv_lens = {20, 9};
  b.page_indices = {0, 1, 2, 3};
  b.cu_q_lens = {0, 8, 9};
  b.num_seqs = 2;
  b.pages_per_seq = 2;
  b.total_num_pages = 8;
  b.max_num_tokens = 16;
  return b;
}

inline std::vector<int32_t> RightSlots(const Batch& b) {
  std::vector<int32_t> slots(b.max_num_tokens, -1);
  for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
    const int32_t begin = b.cu_q_lens[seq], end = b.cu_q_lens[seq + 1];
    for (int32_t i = begin; i < end; ++i) {
      const int64_t position = b.kv_lens[seq] - (end - i);
      slots[i] = static_cast<int32_t>(b.page(seq, position / b.page_size) *
                                          b.page_size +
                                      position % b.page_size);
    }
  }
  return slots;
}

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_TEST_BATCH_H_
