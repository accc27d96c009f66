#include "csrc/core/validate/locate.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/ownership.h"
#include "csrc/core/validate/rules.h"
#include "csrc/core/validate/scan.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

// By sequence and index; else as they were found.
std::vector<Violation> Sorted(std::vector<Violation> found) {
  using Key = std::tuple<int64_t, int64_t, size_t>;  // moves faster
  std::vector<Key> order;
  order.reserve(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    order.emplace_back(found[i].sequence, found[i].index, i);
  }
  std::sort(order.begin(), order.end());
  std::vector<Violation> sorted;
  sorted.reserve(found.size());
  for (const Key& key : order) {
    sorted.push_back(std::move(found[std::get<2>(key)]));
  }
  return sorted;
}

void LocateProduct(const char* a, int64_t x, const char* b, int64_t y,
                   std::vector<Violation>& found) {
  if (x * y <= kInt32Max) return;
  found.push_back({CheckCode::kInt32Product, -1, -1, x * y, kInt32Max,
                   StrCat(a, "=", x, " times ", b, "=", y, " is ", x * y,
                          ", which does not fit int32.")});
}

void LocateNumSeqs(const BatchView& b, std::vector<Violation>& found) {
  if (b.num_seqs > b.max_num_seqs) {
    found.push_back({CheckCode::kNumSeqs, -1, 0, b.num_seqs, b.max_num_seqs,
                     StrCat("num_seqs[0]=", b.num_seqs,
                            " must be less or equal to max_num_seqs=",
                            b.max_num_seqs, ".")});
  } else if (b.num_seqs < 0) {
    found.push_back({CheckCode::kNumSeqs, -1, 0, b.num_seqs, 0,
                     StrCat("num_seqs[0]=", b.num_seqs,
                            " must be in range [0, ", b.max_num_seqs, "].")});
  }
}

// As the TPU compiler writes it: 1.06M.
std::string Mebibytes(int64_t bytes) {
  const int64_t hundredths = (bytes * 100 + (1 << 19)) >> 20;
  const int64_t fraction = hundredths % 100;
  return StrCat(hundredths / 100, fraction < 10 ? ".0" : ".", fraction, "M");
}

class Locator {
 public:
  Locator(const BatchView& batch, Level level, Scan& scan)
      : b_(batch), level_(level), scan_(scan) {}

  std::vector<Violation> Run() && {
    const bool distribution = LocateDistribution();
    if (level_ == Level::kFull) LocateSmemBudget();
    LocateCuQLens();
    LocateRows();
    if (b_.slot_mapping != nullptr) LocateTokens();
    if (level_ == Level::kFull) {
      if (distribution) LocateRanges();
      LocateOwnership(b_, scan_, found_);
    }
    return Sorted(std::move(found_));
  }

 private:
  void Report(CheckCode code, int64_t sequence, int64_t index, int64_t value,
              int64_t limit, std::string message) {
    found_.push_back({code, sequence, index, value, limit, std::move(message)});
  }

  bool LocateDistribution() {
    if (DistributionHolds(b_)) return b_.distribution != nullptr;
    const int32_t* d = b_.distribution;
    Report(CheckCode::kDistribution, -1, -1, d[2], b_.num_seqs,
           StrCat("distribution=(", d[0], ", ", d[1], ", ", d[2],
                  ") must satisfy 0 <= decode <= prefill <= total and total "
                  "== num_seqs=",
                  b_.num_seqs, "."));
    return false;
  }

  void LocateSmemBudget() {
    if (SmemBudgetHolds(b_)) return;
    const int64_t bytes = SmemBytes(b_);
    Report(CheckCode::kSmemBudget, -1, -1, bytes, b_.smem_budget_bytes,
           StrCat("Used ", Mebibytes(bytes), " of ",
                  Mebibytes(b_.smem_budget_bytes), " smem: page_indices of ",
                  b_.max_num_seqs, " rows and ", b_.pages_per_seq,
                  " columns, kv_lens and cu_q_lens take ", bytes,
                  " bytes, more than smem_budget_bytes=", b_.smem_budget_bytes,
                  "."));
  }

  void LocateCuQLens() {
    if (b_.num_seqs == 0) return;
    if (b_.cu_q_lens[0] != 0) {
      Report(CheckCode::kCuQLensStart, -1, 0, b_.cu_q_lens[0], 0,
             StrCat("cu_q_lens[0]=", b_.cu_q_lens[0], " must be 0."));
    }
    const int64_t total = b_.cu_q_lens[b_.num_seqs];
    if (total <= b_.max_num_tokens) return;
    int64_t first = 0;
    while (b_.cu_q_lens[first + 1] <= b_.max_num_tokens) ++first;
    Report(CheckCode::kTotalTokens, -1, b_.num_seqs, total, b_.max_num_tokens,
           StrCat("Total q tokens ", total,
                  " must be less or equal to max_num_batched_tokens=",
                  b_.max_num_tokens, ". Sequence ", first,
                  " is the first that ends past the buffer, at ",
                  b_.cu_q_lens[first + 1], "."));
  }

  void LocateLengths(int64_t seq) {
    const int64_t q_len = b_.q_len(seq), kv_len = b_.kv_len(seq);
    if (q_len < 0) {
      Report(CheckCode::kCuQLensFalls, seq, seq + 1, b_.cu_q_lens[seq + 1],
             b_.cu_q_lens[seq],
             StrCat("cu_q_lens falls at sequence ", seq, ": it starts at ",
                    b_.cu_q_lens[seq], " and ends at ", b_.cu_q_lens[seq + 1],
                    "."));
    }
    if (kv_len < 0) {
      Report(CheckCode::kKvLenNegative, seq, seq, kv_len, 0,
             StrCat("kv_len=", kv_len, " must not be negative at sequence ",
                    seq, "."));
      return;
    }
    if (q_len > kv_len) {
      Report(CheckCode::kQueryExceedsKv, seq, seq, q_len, kv_len,
             StrCat("q_len=", q_len, " must be less or equal to kv_len=",
                    kv_len, " at sequence ", seq, "."));
    }
    const int64_t pages = (kv_len + b_.page_size - 1) / b_.page_size;
    if (pages > b_.pages_per_seq) {
      Report(
          CheckCode::kRowTooShort, seq, seq, pages, b_.pages_per_seq,
          StrCat("pages_per_seq=", b_.pages_per_seq,
                 " must be greater or equal to min_pages_per_seq=", pages,
                 " given max_kv_len=", kv_len, " and page_size=", b_.page_size,
                 ". That is the length of sequence ", seq, "."));
    }
  }

  void LocatePages(int64_t seq) {
    for (const int32_t slot : scan_.FindPagesOutside(seq)) {
      const int64_t page = b_.pages(seq)[slot];
      Report(CheckCode::kPageOutOfRange, seq, slot, page, b_.total_num_pages,
             StrCat("page_indices[", seq, ", ", slot, "]=", page,
                    " must be in range [0, ", b_.total_num_pages,
                    ") at sequence ", seq, "."));
    }
  }

  void LocateRows() {
    for (int64_t seq = 0; seq < b_.num_seqs; ++seq) {
      if (scan_.lengths_are_bad(seq)) LocateLengths(seq);
      if (scan_.has_page_outside(seq)) LocatePages(seq);
    }
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
    Report(CheckCode::kSlotMapping, seq, token, found, slot,
           StrCat("slot_mapping[", token, "]=", found, " must be ", slot,
                  seq < 0 ? std::string(" for a dead token.")
                          : StrCat(" at sequence ", seq, ".")));
  }

  void LocateRanges() {
    const int64_t decode = b_.distribution[0], prefill = b_.distribution[1];
    for (int64_t seq = 0; seq < decode; ++seq) {
      if (b_.q_len(seq) == 1) continue;
      Report(CheckCode::kDecodeRow, seq, seq, b_.q_len(seq), 1,
             StrCat("q_len=", b_.q_len(seq), " must be 1 at sequence ", seq,
                    ", which is in the decode range [0, ", decode, ")."));
    }
    for (int64_t seq = decode; seq < prefill; ++seq) {
      if (b_.q_len(seq) == b_.q_len(decode)) continue;
      Report(CheckCode::kPrefillRow, seq, seq, b_.q_len(seq), b_.q_len(decode),
             StrCat("q_len=", b_.q_len(seq), " must be ", b_.q_len(decode),
                    " at sequence ", seq, ", as for all of the prefill range [",
                    decode, ", ", prefill, ")."));
    }
  }

  const BatchView& b_;
  const Level level_;
  Scan& scan_;
  std::vector<Violation> found_;
};

}  // namespace

std::vector<Violation> LocateSizes(const BatchView& b) {
  std::vector<Violation> found;
  const std::pair<const char*, int64_t> sizes[] = {
      {"page_size", b.page_size},
      {"total_num_pages", b.total_num_pages},
      {"max_num_tokens", b.max_num_tokens}};
  for (const auto& [name, size] : sizes) {
    if (IsSize(size)) continue;
    found.push_back(
        {CheckCode::kSize, -1, -1, size, kInt32Max,
         StrCat(name, "=", size, " must be in range (0, ", kInt32Max, "].")});
  }
  if (!found.empty()) return found;
  LocateProduct("total_num_pages", b.total_num_pages, "page_size", b.page_size,
                found);
  LocateProduct("max_num_seqs", b.max_num_seqs, "pages_per_seq",
                b.pages_per_seq, found);
  LocateNumSeqs(b, found);
  return Sorted(std::move(found));
}

std::vector<Violation> LocateRows(const BatchView& batch, Level level,
                                  Scan& scan) {
  return Locator(batch, level, scan).Run();
}

}  // namespace pagemill::internal
