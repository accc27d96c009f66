#include "csrc/core/validate/locate.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/ownership.h"
#include "csrc/core/validate/rules.h"
#include "csrc/core/validate/scan.h"

namespace pagemill::internal {
namespace {

constexpr size_t kUsual = 128;
constexpr int kMostRuns = 8;

constexpr auto kBefore = [](const Violation& a, const Violation& b) {
  return std::tie(a.sequence, a.index) < std::tie(b.sequence, b.index);
};

// By sequence and index; else as they were found.  Each kind of check goes over
// the rows in order: a few sorted runs, most often, which are merged.
std::vector<Violation> Sorted(std::vector<Violation> found) {
  auto sorted = std::is_sorted_until(found.begin(), found.end(), kBefore);
  for (int run = 0; sorted != found.end(); ++run) {
    if (run == kMostRuns) {
      std::stable_sort(found.begin(), found.end(), kBefore);
      break;
    }
    const auto end = std::is_sorted_until(sorted, found.end(), kBefore);
    std::inplace_merge(found.begin(), sorted, end, kBefore);
    sorted = end;
  }
  return found;
}

bool FitsInt32(int64_t x, int64_t y) { return x * y <= kInt32Max; }

class Locator {
 public:
  Locator(const BatchView& batch, Level level, Scan& scan)
      : b_(batch), level_(level), scan_(scan) {}

  std::vector<Violation> Run() && {
    found_.reserve(kUsual);
    reads_.reserve(kUsual);
    const bool distribution = LocateDistribution();
    if (level_ == Level::kFull) LocateSmemBudget();
    LocateCuQLens();
    LocateRows();
    if (b_.slot_mapping != nullptr) LocateTokens();
    if (level_ == Level::kFull) {
      if (distribution) LocateRanges();
      LocateOwnership(scan_, found_, reads_);
    }
    return Sorted(std::move(found_));
  }

 private:
  void Report(CheckCode code, int64_t sequence, int64_t index, int64_t value,
              int64_t limit, std::array<int64_t, 2> detail = {}) {
    // Not push_back: its copy would wait for the parts of the original.
    found_.emplace_back(code, sequence, index, value, limit, detail);
  }

  bool LocateDistribution() {
    if (DistributionHolds(b_)) return b_.distribution != nullptr;
    const int32_t* d = b_.distribution;
    Report(CheckCode::kDistribution, -1, -1, d[2], b_.num_seqs, {d[0], d[1]});
    return false;
  }

  void LocateSmemBudget() {
    if (SmemBudgetHolds(b_)) return;
    Report(CheckCode::kSmemBudget, -1, -1, SmemBytes(b_), b_.smem_budget_bytes,
           {b_.max_num_seqs, b_.pages_per_seq});
  }

  void LocateCuQLens() {
    if (b_.num_seqs == 0) return;
    if (b_.cu_q_lens[0] != 0) {
      Report(CheckCode::kCuQLensStart, -1, 0, b_.cu_q_lens[0], 0);
    }
    const int64_t total = b_.cu_q_lens[b_.num_seqs];
    if (total <= b_.max_num_tokens) return;
    int64_t first = 0;
    while (b_.cu_q_lens[first + 1] <= b_.max_num_tokens) ++first;
    Report(CheckCode::kTotalTokens, -1, b_.num_seqs, total, b_.max_num_tokens,
           {first, b_.cu_q_lens[first + 1]});
  }

  void LocateLengths(int64_t seq) {
    const int64_t q_len = b_.q_len(seq), kv_len = b_.kv_len(seq);
    if (q_len < 0) {
      Report(CheckCode::kCuQLensFalls, seq, seq + 1, b_.cu_q_lens[seq + 1],
             b_.cu_q_lens[seq]);
    }
    if (kv_len < 0) {
      Report(CheckCode::kKvLenNegative, seq, seq, kv_len, 0);
      return;
    }
    if (q_len > kv_len) {
      Report(CheckCode::kQueryExceedsKv, seq, seq, q_len, kv_len);
    }
    const int64_t pages = (kv_len + b_.page_size - 1) / b_.page_size;
    if (pages > b_.pages_per_seq) {
      Report(CheckCode::kRowTooShort, seq, seq, pages, b_.pages_per_seq,
             {kv_len, b_.page_size});
    }
  }

  // The writers of pages that are read are found later.
  void LocatePages(int64_t seq, std::span<const int32_t> notable) {
    const uint32_t total = static_cast<uint32_t>(b_.total_num_pages);
    const int32_t* pages = b_.pages(seq);
    for (const int32_t slot : notable) {
      const int32_t page = pages[slot];
      if (static_cast<uint32_t>(page) >= total) {
        Report(CheckCode::kPageOutOfRange, seq, slot, page, total);
      } else {
        reads_.push_back(found_.size());
        Report(CheckCode::kSharedPageWritten, seq, slot, page, -1);
      }
    }
  }

  void LocateRows() {
    scan_.ForEachBadRow([&](int64_t seq, std::span<const int32_t> notable) {
      if (scan_.lengths_are_bad(seq)) {
        LocateLengths(seq);
      } else {
        LocatePages(seq, notable);
      }
    });
  }

  // Where a token belongs can be told in sound rows only, and which tokens are
  // dead only when all are sound.
  void LocateTokens() {
    bool all_sound = true;
    for (int64_t seq = 0; seq < b_.num_seqs; ++seq) {
      if (!scan_.is_sound(seq) || !TokensInBuffer(b_, seq)) {
        all_sound = false;
      } else if (scan_.tokens_are_bad(seq)) {
        LocateRowTokens(seq);
      }
    }
    if (!all_sound) return;
    const int64_t live = b_.num_seqs == 0 ? 0 : b_.cu_q_lens[b_.num_seqs];
    for (int64_t i = live; i < b_.max_num_tokens; ++i) LocateSlot(-1, i, -1);
  }

  void LocateRowTokens(int64_t seq) {
    const int64_t end = b_.cu_q_lens[seq + 1];
    for (int64_t i = b_.cu_q_lens[seq]; i < end; ++i) {
      const int64_t position = b_.kv_len(seq) - (end - i);
      const int64_t page = b_.pages(seq)[position / b_.page_size];
      LocateSlot(seq, i, page * b_.page_size + position % b_.page_size);
    }
  }

  void LocateSlot(int64_t seq, int64_t token, int64_t slot) {
    const int64_t found = b_.slot_mapping[token];
    if (found == slot) return;
    Report(CheckCode::kSlotMapping, seq, token, found, slot);
  }

  void LocateRanges() {
    if (DecodeAndPrefillRowsHold(b_)) return;
    const int64_t decode = b_.distribution[0], prefill = b_.distribution[1];
    for (int64_t seq = 0; seq < decode; ++seq) {
      if (b_.q_len(seq) == 1) continue;
      Report(CheckCode::kDecodeRow, seq, seq, b_.q_len(seq), 1, {decode});
    }
    for (int64_t seq = decode; seq < prefill; ++seq) {
      if (b_.q_len(seq) == b_.q_len(decode)) continue;
      Report(CheckCode::kPrefillRow, seq, seq, b_.q_len(seq), b_.q_len(decode),
             {decode, prefill});
    }
  }

  const BatchView& b_;
  const Level level_;
  Scan& scan_;
  std::vector<Violation> found_;
  std::vector<size_t> reads_;  // places in found_
};

}  // namespace

std::vector<Violation> LocateSizes(const BatchView& b) {
  std::vector<Violation> found;
  const int64_t sizes[] = {b.page_size, b.total_num_pages, b.max_num_tokens};
  for (int64_t i = 0; i < 3; ++i) {
    if (IsSize(sizes[i])) continue;
    found.push_back({CheckCode::kSize, -1, -1, sizes[i], kInt32Max, {i}});
  }
  if (!found.empty()) return found;
  const auto check = [&](int64_t x, int64_t y, int64_t which) {
    if (FitsInt32(x, y)) return;
    // A negative factor says which product it is: sizes are not negative.
    found.push_back({CheckCode::kInt32Product,
                     -1,
                     -1,
                     x * y,
                     kInt32Max,
                     {x, which ? -y : y}});
  };
  check(b.total_num_pages, b.page_size, 0);
  check(b.max_num_seqs, b.pages_per_seq, 1);
  if (b.num_seqs > b.max_num_seqs || b.num_seqs < 0) {
    found.push_back({CheckCode::kNumSeqs,
                     -1,
                     0,
                     b.num_seqs,
                     b.num_seqs < 0 ? 0 : b.max_num_seqs,
                     {b.max_num_seqs}});
  }
  return Sorted(std::move(found));
}

std::vector<Violation> LocateRows(const BatchView& batch, Level level,
                                  Scan& scan) {
  return Locator(batch, level, scan).Run();
}

}  // namespace pagemill::internal
