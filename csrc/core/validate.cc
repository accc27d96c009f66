#include "csrc/core/validate.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "csrc/core/ownership.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate_passes.h"

namespace pagemill {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr size_t kMoreShown = 8;

constexpr CheckInfo kChecks[] = {
#define PAGEMILL_CHECK(name, level, rule, remedy) \
  {CheckCode::name, #name, Level::level, rule, remedy},
#include "csrc/core/checks.def"
#undef PAGEMILL_CHECK
};

// ---------------------------------------------------------------- accepting

bool IsSize(int64_t size) { return size > 0 && size <= kInt32Max; }

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

bool LengthsHold(const BatchView& b) {
  if (b.cu_q_lens[0] != 0 && b.num_seqs > 0) return false;
  const int64_t capacity = b.pages_per_seq * b.page_size;
  bool bad = false;
  for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
    const int64_t q_len = b.q_len(seq);
    const int64_t kv_len = b.kv_len(seq);
    bad |= (q_len < 0) | (q_len > kv_len) | (kv_len < 0) | (kv_len > capacity);
  }
  return !bad &&
         (b.num_seqs == 0 || b.cu_q_lens[b.num_seqs] <= b.max_num_tokens);
}

bool PagesHold(const BatchView& b) {
  const uint32_t limit = static_cast<uint32_t>(b.total_num_pages);
  uint32_t bad = 0;
  for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
    const int64_t live = Slots(b, seq).live;
    const int32_t* pages = b.pages(seq);
    for (int64_t i = 0; i < live; ++i) {
      bad |= static_cast<uint32_t>(pages[i]) >= limit;  // negatives wrap high
    }
  }
  return bad == 0;
}

bool RangesHold(const BatchView& b) {
  if (b.distribution == nullptr) return true;
  const int64_t decode = b.distribution[0], prefill = b.distribution[1];
  bool bad = false;
  for (int64_t seq = 0; seq < decode; ++seq) bad |= b.q_len(seq) != 1;
  for (int64_t seq = decode; seq < prefill; ++seq) {
    bad |= b.q_len(seq) != b.q_len(decode);
  }
  return !bad;
}

// Where token `token` of row `seq` belongs.  The row's slots must be sound.
int64_t SlotOf(const BatchView& b, int64_t seq, int64_t token) {
  const int64_t position = b.kv_len(seq) - b.cu_q_lens[seq + 1] + token;
  const int64_t page = b.pages(seq)[position / b.page_size];
  return page * b.page_size + position % b.page_size;
}

int64_t LiveTokens(const BatchView& b) {
  return b.num_seqs == 0 ? 0 : b.cu_q_lens[b.num_seqs];
}

bool SlotsHold(const BatchView& b) {
  if (b.slot_mapping == nullptr) return true;
  bool bad = false;
  for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
    for (int64_t i = b.cu_q_lens[seq]; i < b.cu_q_lens[seq + 1]; ++i) {
      bad |= b.slot_mapping[i] != SlotOf(b, seq, i);
    }
  }
  for (int64_t i = LiveTokens(b); i < b.max_num_tokens; ++i) {
    bad |= b.slot_mapping[i] != -1;
  }
  return !bad;
}

// ----------------------------------------------------------------- locating

class Locator {
 public:
  Locator(const BatchView& batch, Level level) : b_(batch), level_(level) {}

  std::vector<Violation> Run() && {
    LocateSizes();
    // Without sound sizes no row can be read.
    if (!found_.empty()) return std::move(found_);
    const bool distribution = LocateDistribution();
    LocateCuQLens();
    std::vector<bool> usable(b_.num_seqs), sound(b_.num_seqs);
    for (int64_t seq = 0; seq < b_.num_seqs; ++seq) {
      usable[seq] = LocateLengths(seq);
      sound[seq] = usable[seq] && LocatePages(seq);
    }
    if (b_.slot_mapping != nullptr) LocateSlots(sound);
    if (level_ == Level::kFull) {
      if (distribution) LocateRanges();
      LocateOwnership(b_, usable, found_);
    }
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Violation& x, const Violation& y) {
                       return std::tie(x.sequence, x.index) <
                              std::tie(y.sequence, y.index);
                     });
    return std::move(found_);
  }

 private:
  void Report(CheckCode code, int64_t sequence, int64_t index, int64_t value,
              int64_t limit, std::string message) {
    found_.push_back({code, sequence, index, value, limit, std::move(message)});
  }

  void LocateSizes() {
    const std::pair<const char*, int64_t> sizes[] = {
        {"page_size", b_.page_size},
        {"total_num_pages", b_.total_num_pages},
        {"max_num_tokens", b_.max_num_tokens}};
    for (const auto& [name, size] : sizes) {
      if (IsSize(size)) continue;
      Report(
          CheckCode::kSize, -1, -1, size, kInt32Max,
          StrCat(name, "=", size, " must be in range (0, ", kInt32Max, "]."));
    }
    if (!found_.empty()) return;
    LocateProduct("total_num_pages", b_.total_num_pages, "page_size",
                  b_.page_size);
    LocateProduct("max_num_seqs", b_.max_num_seqs, "pages_per_seq",
                  b_.pages_per_seq);
    if (b_.num_seqs > b_.max_num_seqs) {
      Report(CheckCode::kNumSeqs, -1, 0, b_.num_seqs, b_.max_num_seqs,
             StrCat("num_seqs[0]=", b_.num_seqs,
                    " must be less or equal to max_num_seqs=", b_.max_num_seqs,
                    "."));
    } else if (b_.num_seqs < 0) {
      Report(CheckCode::kNumSeqs, -1, 0, b_.num_seqs, 0,
             StrCat("num_seqs[0]=", b_.num_seqs, " must be in range [0, ",
                    b_.max_num_seqs, "]."));
    }
  }

  void LocateProduct(const char* a, int64_t x, const char* b, int64_t y) {
    if (x * y <= kInt32Max) return;
    Report(CheckCode::kInt32Product, -1, -1, x * y, kInt32Max,
           StrCat(a, "=", x, " times ", b, "=", y, " is ", x * y,
                  ", which does not fit int32."));
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

  // False when the row's slots cannot be told from its lengths.
  bool LocateLengths(int64_t seq) {
    const int64_t q_len = b_.q_len(seq), kv_len = b_.kv_len(seq);
    bool usable = true;
    if (q_len < 0) {
      Report(CheckCode::kCuQLensFalls, seq, seq + 1, b_.cu_q_lens[seq + 1],
             b_.cu_q_lens[seq],
             StrCat("cu_q_lens falls at sequence ", seq, ": it starts at ",
                    b_.cu_q_lens[seq], " and ends at ", b_.cu_q_lens[seq + 1],
                    "."));
      usable = false;
    }
    if (kv_len < 0) {
      Report(CheckCode::kKvLenNegative, seq, seq, kv_len, 0,
             StrCat("kv_len=", kv_len, " must not be negative at sequence ",
                    seq, "."));
      return false;
    }
    if (q_len > kv_len) {
      Report(CheckCode::kQueryExceedsKv, seq, seq, q_len, kv_len,
             StrCat("q_len=", q_len, " must be less or equal to kv_len=",
                    kv_len, " at sequence ", seq, "."));
      usable = false;
    }
    const int64_t pages = (kv_len + b_.page_size - 1) / b_.page_size;
    if (pages > b_.pages_per_seq) {
      Report(
          CheckCode::kRowTooShort, seq, seq, pages, b_.pages_per_seq,
          StrCat("pages_per_seq=", b_.pages_per_seq,
                 " must be greater or equal to min_pages_per_seq=", pages,
                 " given max_kv_len=", kv_len, " and page_size=", b_.page_size,
                 ". That is the length of sequence ", seq, "."));
      usable = false;
    }
    return usable;
  }

  // False when a live slot holds no page.
  bool LocatePages(int64_t seq) {
    const size_t before = found_.size();
    const int64_t live = Slots(b_, seq).live;
    for (int64_t slot = 0; slot < live; ++slot) {
      const int64_t page = b_.pages(seq)[slot];
      if (page >= 0 && page < b_.total_num_pages) continue;
      Report(CheckCode::kPageOutOfRange, seq, slot, page, b_.total_num_pages,
             StrCat("page_indices[", seq, ", ", slot, "]=", page,
                    " must be in range [0, ", b_.total_num_pages,
                    ") at sequence ", seq, "."));
    }
    return found_.size() == before;
  }

  // Where a token belongs can be told in sound rows only, and which tokens are
  // dead only when all are sound.
  void LocateSlots(const std::vector<bool>& sound) {
    bool all = true;
    for (int64_t seq = 0; seq < b_.num_seqs; ++seq) {
      const int64_t begin = b_.cu_q_lens[seq], end = b_.cu_q_lens[seq + 1];
      if (!sound[seq] || begin < 0 || end > b_.max_num_tokens) {
        all = false;
        continue;
      }
      for (int64_t i = begin; i < end; ++i) {
        LocateSlot(seq, i, SlotOf(b_, seq, i));
      }
    }
    if (!all) return;
    for (int64_t i = LiveTokens(b_); i < b_.max_num_tokens; ++i) {
      LocateSlot(-1, i, -1);
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
  std::vector<Violation> found_;
};

}  // namespace

bool internal::Accepts(const BatchView& b, Level level) {
  if (!SizesHold(b) || !DistributionHolds(b) || !LengthsHold(b) ||
      !PagesHold(b) || !SlotsHold(b)) {
    return false;
  }
  return level == Level::kStructure || (RangesHold(b) && OwnershipHolds(b));
}

std::vector<Violation> internal::Locate(const BatchView& batch, Level level) {
  return Locator(batch, level).Run();
}

std::span<const CheckInfo> AllChecks() { return kChecks; }

std::string_view Violation::remedy() const {
  return kChecks[static_cast<size_t>(code)].remedy;
}

std::vector<Violation> Validate(const BatchView& batch, Level level) {
  if (internal::Accepts(batch, level)) return {};
  return internal::Locate(batch, level);
}

std::string FormatViolations(std::span<const Violation> violations) {
  if (violations.empty()) return "no violations";
  const auto line = [](const Violation& v) {
    return StrCat(v.message, " (", v.remedy(), ")");
  };
  std::string text = line(violations.front());
  const size_t more = violations.size() - 1;
  for (size_t i = 1; i <= std::min(more, kMoreShown); ++i) {
    text += StrCat("\n  also: ", violations[i].message);
  }
  if (more > kMoreShown) {
    text += StrCat("\n  and ", more - kMoreShown, " more.");
  }
  return text;
}

}  // namespace pagemill
