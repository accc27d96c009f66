// Both passes, with each scan of the table, against the rules written out
// plainly.
#include "csrc/core/validate/passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/scanners.h"
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/validate/test_batch.h"

namespace pagemill {

void PrintTo(CheckCode code, std::ostream* out) {
  *out << AllChecks()[static_cast<size_t>(code)].name;
}

namespace {

// Sequence, index, code, value, limit.
using Fault = std::tuple<int64_t, int64_t, CheckCode, int64_t, int64_t>;

constexpr int64_t kMax = 2147483647;

// The rules, slot by slot and pair by pair.
class Oracle {
 public:
  Oracle(const BatchView& batch, Level level) : b_(batch) {
    Sizes();
    if (!faults_.empty()) return;
    const bool full = level == Level::kFull;
    Distribution(full);
    if (full) Smem();
    CuQLens();
    for (int64_t s = 0; s < b_.num_seqs; ++s) {
      sound_.push_back(Row(s));
      if (sound_.back()) Pages(s);
    }
    if (b_.slot_mapping != nullptr) Tokens();
    if (full) Ownership();
  }

  std::multiset<Fault> faults() const { return faults_; }

 private:
  void Add(CheckCode code, int64_t s, int64_t index, int64_t value,
           int64_t limit) {
    faults_.emplace(s, index, code, value, limit);
  }

  void Sizes() {
    for (const int64_t size :
         {b_.page_size, b_.total_num_pages, b_.max_num_tokens}) {
      if (size < 1 || size > kMax) Add(CheckCode::kSize, -1, -1, size, kMax);
    }
    if (!faults_.empty()) return;
    for (const int64_t product : {b_.total_num_pages * b_.page_size,
                                  b_.max_num_seqs * b_.pages_per_seq}) {
      if (product > kMax) {
        Add(CheckCode::kInt32Product, -1, -1, product, kMax);
      }
    }
    if (b_.num_seqs < 0) Add(CheckCode::kNumSeqs, -1, 0, b_.num_seqs, 0);
    if (b_.num_seqs > b_.max_num_seqs) {
      Add(CheckCode::kNumSeqs, -1, 0, b_.num_seqs, b_.max_num_seqs);
    }
  }

  void Distribution(bool full) {
    if (b_.distribution == nullptr) return;
    const int64_t i = b_.distribution[0], j = b_.distribution[1],
                  k = b_.distribution[2];
    if (i < 0 || j < i || k < j || k != b_.num_seqs) {
      Add(CheckCode::kDistribution, -1, -1, k, b_.num_seqs);
      return;
    }
    for (int64_t s = 0; full && s < j; ++s) {
      const int64_t q = Q(s), want = s < i ? 1 : Q(i);
      if (q == want) continue;
      Add(s < i ? CheckCode::kDecodeRow : CheckCode::kPrefillRow, s, s, q,
          want);
    }
  }

  void Smem() {
    int64_t entries = 0;
    const auto vector = [&](int64_t size) {
      while (size > 0) {
        entries += 128;
        size -= 128;
      }
    };
    for (int64_t s = 0; s < b_.max_num_seqs; ++s) vector(b_.pages_per_seq);
    vector(b_.max_num_seqs);
    vector(b_.max_num_seqs + 1);
    vector(1);
    if (b_.smem_budget_bytes > 0 && 4 * entries > b_.smem_budget_bytes) {
      Add(CheckCode::kSmemBudget, -1, -1, 4 * entries, b_.smem_budget_bytes);
    }
  }

  void CuQLens() {
    if (b_.num_seqs == 0) return;
    const int64_t first = b_.cu_q_lens[0], last = b_.cu_q_lens[b_.num_seqs];
    if (first != 0) Add(CheckCode::kCuQLensStart, -1, 0, first, 0);
    if (last > b_.max_num_tokens) {
      Add(CheckCode::kTotalTokens, -1, b_.num_seqs, last, b_.max_num_tokens);
    }
  }

  bool Row(int64_t s) {
    const size_t before = faults_.size();
    const int64_t q = Q(s), kv = b_.kv_lens[s];
    if (q < 0) {
      Add(CheckCode::kCuQLensFalls, s, s + 1, b_.cu_q_lens[s + 1],
          b_.cu_q_lens[s]);
    }
    if (kv < 0) {
      Add(CheckCode::kKvLenNegative, s, s, kv, 0);
      return false;
    }
    if (q > kv) Add(CheckCode::kQueryExceedsKv, s, s, q, kv);
    const int64_t pages = kv / b_.page_size + (kv % b_.page_size != 0);
    if (pages > b_.pages_per_seq) {
      Add(CheckCode::kRowTooShort, s, s, pages, b_.pages_per_seq);
    }
    return faults_.size() == before;
  }

  // A slot is live when a query of the row, or one to come, sees a key in it.
  bool Live(int64_t s, int64_t slot) const {
    const int64_t begin = slot * b_.page_size, kv = b_.kv_lens[s];
    if (begin >= kv) return false;
    if (b_.sliding_window <= 0) return true;
    const int64_t first_query = kv - Q(s);
    const int64_t last_key = begin + b_.page_size - 1;
    return first_query - last_key < b_.sliding_window;
  }

  // A slot is written when a token of this step lies in it.
  bool Written(int64_t s, int64_t slot) const {
    const int64_t begin = slot * b_.page_size, kv = b_.kv_lens[s];
    for (int64_t p = begin; p < begin + b_.page_size && p < kv; ++p) {
      if (p >= kv - Q(s)) return true;
    }
    return false;
  }

  void Pages(int64_t s) {
    for (int64_t i = 0; i < b_.pages_per_seq; ++i) {
      if (!Live(s, i) || InRange(Page(s, i))) continue;
      Add(CheckCode::kPageOutOfRange, s, i, Page(s, i), b_.total_num_pages);
      has_stray_.insert(s);
    }
  }

  void Tokens() {
    bool all = true;
    for (int64_t s = 0; s < b_.num_seqs; ++s) {
      const int64_t begin = b_.cu_q_lens[s], end = b_.cu_q_lens[s + 1];
      if (!sound_[s] || has_stray_.contains(s) || begin < 0 ||
          end > b_.max_num_tokens) {
        all = false;
        continue;
      }
      for (int64_t t = begin; t < end; ++t) {
        const int64_t position = b_.kv_lens[s] - end + t;
        const int64_t page = Page(s, position / b_.page_size);
        Token(s, t, page * b_.page_size + position % b_.page_size);
      }
    }
    const int64_t live = b_.num_seqs == 0 ? 0 : b_.cu_q_lens[b_.num_seqs];
    for (int64_t t = live; all && t < b_.max_num_tokens; ++t) Token(-1, t, -1);
  }

  void Token(int64_t s, int64_t token, int64_t slot) {
    if (b_.slot_mapping[token] == slot) return;
    Add(CheckCode::kSlotMapping, s, token, b_.slot_mapping[token], slot);
  }

  void Ownership() {
    std::map<int64_t, int64_t> writers;
    ForLive([&](int64_t s, int64_t slot, int64_t page) {
      if (!Written(s, slot)) return;
      const auto [writer, first] = writers.emplace(page, s);
      if (!first) {
        Add(CheckCode::kPageWrittenTwice, s, slot, page, writer->second);
      }
    });
    ForLive([&](int64_t s, int64_t slot, int64_t page) {
      if (Written(s, slot) || !writers.contains(page)) return;
      Add(CheckCode::kSharedPageWritten, s, slot, page, writers[page]);
    });
  }

  template <typename Visit>
  void ForLive(const Visit& visit) const {
    for (int64_t s = 0; s < b_.num_seqs; ++s) {
      for (int64_t i = 0; sound_[s] && i < b_.pages_per_seq; ++i) {
        if (Live(s, i) && InRange(Page(s, i))) visit(s, i, Page(s, i));
      }
    }
  }

  int64_t Q(int64_t s) const {
    return int64_t{b_.cu_q_lens[s + 1]} - b_.cu_q_lens[s];
  }
  int64_t Page(int64_t s, int64_t slot) const {
    return b_.page_indices[s * b_.pages_per_seq + slot];
  }
  bool InRange(int64_t page) const {
    return 0 <= page && page < b_.total_num_pages;
  }

  const BatchView& b_;
  std::vector<bool> sound_;  // by their lengths
  std::set<int64_t> has_stray_;
  std::multiset<Fault> faults_;
};

// Draws batches and damages.
class Generator {
 public:
  explicit Generator(uint32_t seed) : rng_(seed) {}

  int64_t Draw(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng_);
  }
  bool OneIn(int64_t n) { return Draw(1, n) == 1; }

  // Rows that end before, on and behind the borders of vectors.
  Batch Sound(int64_t max_width) {
    const int64_t rows = Draw(1, 9);
    Batch b = Good(rng_, rows, Draw(0, rows), Draw(1, max_width));
    if (OneIn(3)) SpreadOut(b);
    if (OneIn(2)) b.slot_mapping = RightSlots(b);
    if (OneIn(3)) b.sliding_window = Draw(1, b.pages_per_seq * b.page_size);
    if (OneIn(3)) b.smem_budget_bytes = 1 << 20;
    if (OneIn(3)) b.distribution.clear();
    return b;
  }

  // May miss: what it aims at can be in a dead row, or right by chance.
  void Damage(Batch& b) {
    Damage(b, static_cast<CheckCode>(Draw(0, std::ssize(AllChecks()) - 1)));
  }

 private:
  // So many pages that they are looked up through the filter, in which those
  // of one remainder fall together.
  static void SpreadOut(Batch& b) {
    for (int32_t& page : b.page_indices) {
      if (page >= 0) page = page % 7 + ((page / 7) << 17);
    }
    b.total_num_pages = int64_t{100} << 17;
  }

  void Damage(Batch& b, CheckCode code) {
    const int64_t rows = static_cast<int64_t>(b.kv_lens.size());
    const int64_t s = Draw(0, rows - 1), t = Draw(0, rows - 1);
    const auto slot = [&](int64_t seq) {
      const int64_t last = b.pages_per_seq - 1;
      const bool at_end = OneIn(2) && b.page_size > 0 && b.kv_lens[seq] > 0;
      return at_end ? std::min(b.live(seq) - 1, last) : Draw(0, last);
    };
    switch (code) {
      case CheckCode::kSize: {
        int64_t* sizes[] = {&b.page_size, &b.total_num_pages,
                            &b.max_num_tokens};
        if (OneIn(4)) *sizes[Draw(0, 2)] = Draw(-1, 0);
        break;
      }
      case CheckCode::kInt32Product:
        if (!OneIn(4)) break;
        b.total_num_pages = kMax / std::max<int64_t>(b.page_size, 1) + 1;
        break;
      case CheckCode::kNumSeqs:
        if (OneIn(4)) b.num_seqs = OneIn(2) ? -1 : rows + 1;
        break;
      case CheckCode::kDistribution:
        b.distribution = {Any(), Any(), static_cast<int32_t>(b.num_seqs)};
        if (OneIn(2)) b.distribution = {0, 0, Any()};
        break;
      case CheckCode::kCuQLensStart:
        b.cu_q_lens[0] = Any();
        break;
      case CheckCode::kCuQLensFalls:
      case CheckCode::kTotalTokens:
        b.cu_q_lens[s + 1] = Any();
        break;
      case CheckCode::kKvLenNegative:
      case CheckCode::kQueryExceedsKv:
        b.kv_lens[s] = Any();
        break;
      case CheckCode::kRowTooShort:
        b.kv_lens[s] = static_cast<int32_t>(b.pages_per_seq * b.page_size + 1);
        break;
      case CheckCode::kPageOutOfRange:
        b.page(s, slot(s)) =
            OneIn(2) ? Any() : static_cast<int32_t>(b.total_num_pages);
        break;
      case CheckCode::kDecodeRow:
      case CheckCode::kPrefillRow: {
        const int32_t end = static_cast<int32_t>(b.num_seqs);
        const int32_t decode = static_cast<int32_t>(Draw(0, std::max(end, 0)));
        b.distribution = {decode, end, end};
        break;
      }
      case CheckCode::kPageWrittenTwice:
      case CheckCode::kSharedPageWritten:
        b.page(s, slot(s)) = b.page(t, slot(t));
        break;
      case CheckCode::kSlotMapping:
        if (b.slot_mapping.empty()) break;
        b.slot_mapping[Draw(0, std::ssize(b.slot_mapping) - 1)] = Any();
        break;
      case CheckCode::kSmemBudget:
        b.smem_budget_bytes = Draw(1, 4 * 128 * 16);
        break;
    }
  }

  int32_t Any() {
    return static_cast<int32_t>(OneIn(3) ? Draw(-kMax - 1, kMax)
                                         : Draw(-2, 40));
  }

  std::mt19937 rng_;
};

std::multiset<Fault> Faults(const std::vector<Violation>& violations) {
  std::multiset<Fault> faults;
  for (const Violation& v : violations) {
    faults.emplace(v.sequence, v.index, v.code, v.value, v.limit);
    EXPECT_FALSE(v.message().empty());
  }
  return faults;
}

class PassesTest
    : public testing::TestWithParam<const internal::TableScanner*> {
 protected:
  // Returns what is wrong with the batch.
  std::multiset<Fault> Compare(const Batch& batch, Level level) {
    const BatchView view = batch.View();
    const std::multiset<Fault> expected = Oracle(view, level).faults();
    for (int call = 0; call < 2; ++call) {  // the first leaves nothing behind
      EXPECT_EQ(internal::Accepts(view, level, *GetParam()), expected.empty());
    }
    const std::vector<Violation> found =
        internal::Locate(view, level, *GetParam());
    EXPECT_EQ(Faults(found), expected);
    EXPECT_TRUE(std::is_sorted(
        found.begin(), found.end(), [](const auto& x, const auto& y) {
          return std::tie(x.sequence, x.index) < std::tie(y.sequence, y.index);
        }));
    return expected;
  }
};

TEST_P(PassesTest, SoundBatches) {
  Generator generate(1);
  for (int round = 0; round < 1500 && !HasFailure(); ++round) {
    const Batch b = generate.Sound(70);
    EXPECT_TRUE(Compare(b, Level::kFull).empty());
  }
}

TEST_P(PassesTest, DamagedBatches) {
  Generator generate(2);
  std::map<CheckCode, int> seen, alone;
  for (int round = 0; round < 12000 && !HasFailure(); ++round) {
    Batch b = generate.Sound(round % 10 == 0 ? 70 : 6);
    for (int64_t n = generate.Draw(1, 4); n > 0; --n) generate.Damage(b);
    const Level level = generate.OneIn(3) ? Level::kStructure : Level::kFull;
    std::set<CheckCode> codes;
    for (const Fault& fault : Compare(b, level)) {
      codes.insert(std::get<2>(fault));
    }
    for (const CheckCode code : codes) ++seen[code];
    if (codes.size() == 1) ++alone[*codes.begin()];
  }
  // Each check decided alone about some batches: none can go unnoticed.
  for (const CheckInfo& check : AllChecks()) {
    EXPECT_GT(seen[check.code], 20) << check.name;
    EXPECT_GT(alone[check.code], 5) << check.name;
  }
}

// Rows of which everything passes the filters, in groups and alone.
TEST_P(PassesTest, ManyPagesThatTheFilterConfuses) {
  Batch b;
  b.page_size = 1;
  b.pages_per_seq = 3000;
  b.total_num_pages = kMax;
  b.kv_lens = {1000, 1, 1048, 2047, 3000};
  b.num_seqs = std::ssize(b.kv_lens);
  b.max_num_tokens = b.num_seqs;
  b.cu_q_lens.resize(b.num_seqs + 1);
  std::iota(b.cu_q_lens.begin(), b.cu_q_lens.end(), 0);
  for (int32_t i = 0; i < b.num_seqs * b.pages_per_seq; ++i) {
    b.page_indices.push_back(i << 17);
  }
  EXPECT_TRUE(Compare(b, Level::kFull).empty());
  for (const int64_t slot : {0, 500, 2046}) {
    Batch bad = b;
    bad.page(1, 0) = b.page(3, slot);
    EXPECT_EQ(Compare(bad, Level::kFull).size(), 1);
  }
}

// Scans take rows together, and long ones in parts.
TEST_P(PassesTest, RowsOfAllLengths) {
  constexpr int64_t kRows = 70, kWidth = 5000;
  constexpr int64_t kLengths[] = {1, 15, 16, 17, 500, 2048, 2049, kWidth};
  Generator generate(4);
  for (int round = 0; round < 60 && !HasFailure(); ++round) {
    Batch b;
    b.page_size = 1;
    b.pages_per_seq = kWidth;
    b.total_num_pages = kRows * kWidth;
    b.num_seqs = kRows;
    b.max_num_tokens = kRows;
    b.page_indices.resize(kRows * kWidth);
    std::iota(b.page_indices.begin(), b.page_indices.end(), 0);
    b.cu_q_lens.resize(kRows + 1);
    std::iota(b.cu_q_lens.begin(), b.cu_q_lens.end(), 0);
    for (int64_t s = 0; s < kRows; ++s) {
      const int64_t length = kLengths[generate.Draw(0, 7)];
      b.kv_lens.push_back(static_cast<int32_t>(
          generate.OneIn(5) ? length : std::min<int64_t>(length, 17)));
    }
    EXPECT_TRUE(Compare(b, Level::kFull).empty());
    const int64_t longest =
        std::ranges::max_element(b.kv_lens) - b.kv_lens.begin();
    for (int64_t n = generate.Draw(1, 3); n > 0; --n) {
      const int64_t s =
          generate.OneIn(2) ? longest : generate.Draw(0, kRows - 1);
      const int64_t t = generate.Draw(0, kRows - 1);
      b.page(s, generate.Draw(0, b.kv_lens[s] - 1)) =
          generate.OneIn(3) ? -1 : b.page(t, b.kv_lens[t] - 1);
    }
    Compare(b, Level::kFull);
  }
}

// More pages are written than any filter takes.
TEST_P(PassesTest, ManyPagesWritten) {
  constexpr int32_t kWritten = 20001;
  Batch b;
  b.page_size = 1;
  b.pages_per_seq = kWritten;
  b.total_num_pages = int64_t{1} << 20;
  b.num_seqs = 2;
  b.kv_lens = {kWritten, 101};
  b.cu_q_lens = {0, kWritten, kWritten + 1};
  b.max_num_tokens = kWritten + 1;
  for (int32_t i = 0; i < 2 * kWritten; ++i) b.page_indices.push_back(7 * i);
  EXPECT_TRUE(Compare(b, Level::kFull).empty());
  b.page(1, 99) = b.page(0, 12345);
  b.page(0, 7) = b.page(0, 20000);
  EXPECT_EQ(Compare(b, Level::kFull),
            std::multiset<Fault>(
                {{0, 20000, CheckCode::kPageWrittenTwice, 7 * 20000, 0},
                 {1, 99, CheckCode::kSharedPageWritten, 7 * 12345, 0}}));
}

// Marks must not survive a call.
TEST_P(PassesTest, CallsLeaveNoTrace) {
  Generator generate(3);
  std::vector<Batch> batches;
  for (int i = 0; i < 40; ++i) batches.push_back(generate.Sound(20));
  for (int round = 0; round < 500 && !HasFailure(); ++round) {
    Batch damaged = batches[round % 40];
    generate.Damage(damaged);
    Compare(damaged, Level::kFull);
    EXPECT_TRUE(Compare(batches[(round * 7 + 1) % 40], Level::kFull).empty());
  }
}

INSTANTIATE_TEST_SUITE_P(Scanners, PassesTest,
                         testing::ValuesIn(internal::TableScanners()),
                         [](const auto& info) {
                           return std::string(info.param->name);
                         });

}  // namespace
}  // namespace pagemill
