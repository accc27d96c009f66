#include "csrc/core/validate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate/passes.h"
#include "csrc/core/validate/scanners.h"
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/validate/test_batch.h"

namespace pagemill {
namespace {

// The one violation, on which all instruction sets agree.
Violation Only(const Batch& batch) {
  const std::vector<Violation> found = batch.Check();
  for (const internal::TableScanner* scanner : internal::TableScanners()) {
    EXPECT_FALSE(internal::Accepts(batch.View(), Level::kFull, *scanner))
        << scanner->name;
    const std::vector<Violation> same =
        internal::Locate(batch.View(), Level::kFull, *scanner);
    EXPECT_EQ(FormatViolations(same), FormatViolations(found)) << scanner->name;
  }
  EXPECT_EQ(found.size(), 1u) << FormatViolations(found);
  return found.empty() ? Violation{} : found.front();
}

TEST(ValidateTest, AcceptsGoodBatches) {
  std::mt19937 rng(1);
  for (int i = 0; i < 500; ++i) {
    const int64_t rows = 1 + i % 9;
    Batch b = Good(rng, rows, i % (rows + 1));
    if (i % 2 == 0) b.slot_mapping = RightSlots(b);
    EXPECT_EQ(FormatViolations(b.Check()), "no violations");
  }
}

TEST(ValidateTest, EachCodeHasAFailingBatch) {
  std::set<CheckCode> seen;
  const auto fails = [&](CheckCode code, auto&& damage) {
    Batch b = Small();
    damage(b);
    const Violation found = Only(b);
    EXPECT_EQ(found.code, code) << found.message();
    EXPECT_FALSE(found.message().empty());
    EXPECT_FALSE(found.remedy().empty());
    seen.insert(found.code);
  };
  fails(CheckCode::kSize, [](Batch& b) { b.page_size = 0; });
  fails(CheckCode::kInt32Product,
        [](Batch& b) { b.total_num_pages = 1 << 28; });
  fails(CheckCode::kNumSeqs, [](Batch& b) { b.num_seqs = 3; });
  fails(CheckCode::kNumSeqs, [](Batch& b) { b.num_seqs = -1; });
  fails(CheckCode::kDistribution, [](Batch& b) { b.distribution = {1, 0, 2}; });
  fails(CheckCode::kCuQLensStart, [](Batch& b) { b.cu_q_lens[0] = 2; });
  fails(CheckCode::kCuQLensFalls, [](Batch& b) { b.cu_q_lens[2] = 7; });
  fails(CheckCode::kTotalTokens, [](Batch& b) { b.max_num_tokens = 8; });
  fails(CheckCode::kKvLenNegative, [](Batch& b) { b.kv_lens[1] = -1; });
  fails(CheckCode::kQueryExceedsKv, [](Batch& b) { b.kv_lens[0] = 4; });
  fails(CheckCode::kRowTooShort, [](Batch& b) { b.kv_lens[0] = 40; });
  fails(CheckCode::kPageOutOfRange, [](Batch& b) { b.page(1, 0) = -1; });
  fails(CheckCode::kDecodeRow, [](Batch& b) { b.distribution = {1, 1, 2}; });
  fails(CheckCode::kPrefillRow, [](Batch& b) { b.distribution = {0, 2, 2}; });
  fails(CheckCode::kPageWrittenTwice, [](Batch& b) { b.page(1, 0) = 1; });
  fails(CheckCode::kSharedPageWritten, [](Batch& b) {
    b.cu_q_lens = {0, 1, 2};
    b.page(1, 0) = 0;
  });
  fails(CheckCode::kSlotMapping, [](Batch& b) {
    b.slot_mapping = RightSlots(b);
    b.slot_mapping[8] = 0;
  });
  fails(CheckCode::kSlotMapping, [](Batch& b) {
    b.slot_mapping = RightSlots(b);
    b.slot_mapping[15] = 127;  // a dead token
  });
  // 2 rows of 128 lanes, and 128 for each of three vectors.
  fails(CheckCode::kSmemBudget,
        [](Batch& b) { b.smem_budget_bytes = 4 * 128 * 5 - 1; });
  EXPECT_EQ(seen.size(), AllChecks().size());
}

TEST(ValidateTest, PublicMessages) {
  Batch b = Small();
  b.num_seqs = 3;
  EXPECT_EQ(Only(b).message(),
            "num_seqs[0]=3 must be less or equal to max_num_seqs=2.");
  b = Small();
  b.kv_lens[0] = 4;
  EXPECT_EQ(Only(b).message(),
            "q_len=8 must be less or equal to kv_len=4 at sequence 0.");
}

TEST(ValidateTest, ReadOnlySharingIsFine) {
  Batch b = Small();
  b.kv_lens = {20, 20};
  b.cu_q_lens = {0, 1, 2};
  b.page_indices = {0, 1, 0, 2};
  EXPECT_TRUE(b.Check().empty());
}

TEST(ValidateTest, APageTwiceInOneRow) {
  Batch b = Small();
  b.page(0, 0) = 1;  // both slots of sequence 0 are written
  EXPECT_EQ(Only(b).code, CheckCode::kPageWrittenTwice);
  b.cu_q_lens = {0, 1, 2};  // only the second is
  EXPECT_EQ(Only(b).code, CheckCode::kSharedPageWritten);
}

TEST(ValidateTest, APageOutsideHidesNoRead) {
  Batch b = Small();
  b.cu_q_lens = {0, 1, 2};
  // Row 0 writes to no page and reads what row 1 writes: as many slots that
  // name a written page as a good row has.
  b.page(0, 1) = 99;
  b.page(1, 0) = b.page(0, 0);
  const std::vector<Violation> found = b.Check();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].code, CheckCode::kSharedPageWritten);
  EXPECT_EQ(found[0].limit, 1);
  EXPECT_EQ(found[1].code, CheckCode::kPageOutOfRange);
}

TEST(ValidateTest, StructureLeavesOwnershipOut) {
  Batch b = Small();
  b.page(1, 0) = 1;
  b.distribution = {1, 1, 2};
  EXPECT_TRUE(b.Check(Level::kStructure).empty());
  EXPECT_EQ(b.Check().size(), 2u);
}

TEST(ValidateTest, RejectingLeavesNoTrace) {
  // The marks of a refused batch must not leak into the next call.
  Batch bad = Small();
  bad.page(1, 0) = 1;
  EXPECT_FALSE(bad.Check().empty());
  Batch good = Small();
  good.page_indices = {4, 5, 1, 0};
  EXPECT_TRUE(good.Check().empty());
}

// Plants faults whose reports are known, in distinct rows, and expects exactly
// these.
TEST(ValidateTest, FindsExactlyThePlantedFaults) {
  std::mt19937 rng(2);
  for (int round = 0; round < 400; ++round) {
    Batch b = Good(rng, 8, 8);
    b.distribution.clear();
    std::set<std::tuple<int64_t, CheckCode>> planted;
    for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
      switch (std::uniform_int_distribution<int>(0, 6)(rng)) {
        case 0: {
          const int64_t slot =
              std::uniform_int_distribution<int64_t>(0, b.live(seq) - 1)(rng);
          b.page(seq, slot) = round % 2 ? -1 : int32_t(b.total_num_pages);
          planted.emplace(seq, CheckCode::kPageOutOfRange);
          break;
        }
        case 1:
          b.kv_lens[seq] =
              static_cast<int32_t>(b.pages_per_seq * b.page_size + 1);
          planted.emplace(seq, CheckCode::kRowTooShort);
          break;
        case 2:
          if (b.cu_q_lens[seq + 1] == b.cu_q_lens[seq]) break;
          b.kv_lens[seq] = b.cu_q_lens[seq + 1] - b.cu_q_lens[seq] - 1;
          planted.emplace(seq, CheckCode::kQueryExceedsKv);
          break;
        case 3:
          b.kv_lens[seq] = -5;
          planted.emplace(seq, CheckCode::kKvLenNegative);
          break;
        default:
          break;
      }
    }
    std::set<std::tuple<int64_t, CheckCode>> found;
    for (const Violation& v : b.Check()) found.emplace(v.sequence, v.code);
    EXPECT_EQ(found, planted);
  }
}

// Arrays of any content: no read out of bounds, and both passes agree.
TEST(ValidateTest, ArbitraryArrays) {
  std::mt19937 rng(3);
  const auto any = [&]() -> int32_t {
    switch (rng() % 4) {
      case 0:
        return static_cast<int32_t>(rng());
      case 1:
        return static_cast<int32_t>(rng() % 64) - 8;
      default:
        return static_cast<int32_t>(rng() % 8);
    }
  };
  for (int round = 0; round < 20000; ++round) {
    Batch b = Good(rng, 4, rng() % 5, 3);
    if (rng() % 2 == 0) b.slot_mapping = RightSlots(b);
    for (unsigned damages = rng() % 6; damages > 0; --damages) {
      std::vector<int32_t>* arrays[] = {&b.kv_lens, &b.page_indices,
                                        &b.cu_q_lens, &b.distribution};
      std::vector<int32_t>& array = *arrays[rng() % 4];
      array[rng() % array.size()] = any();
    }
    if (rng() % 8 == 0) b.num_seqs = any();
    for (const Level level : {Level::kStructure, Level::kFull}) {
      const std::vector<Violation> found = b.Check(level);
      EXPECT_TRUE(std::is_sorted(found.begin(), found.end(),
                                 [](const auto& x, const auto& y) {
                                   return x.sequence < y.sequence;
                                 }));
      // A full check finds all that a structural one does.
      if (level == Level::kFull) {
        EXPECT_GE(found.size(), b.Check(Level::kStructure).size());
      }
    }
  }
}

// Ownership by brute force: every pair of live slots.
TEST(ValidateTest, OwnershipEqualsBruteForce) {
  std::mt19937 rng(4);
  for (int round = 0; round < 3000; ++round) {
    Batch b = Good(rng, 4, 4, 3);
    b.distribution.clear();
    for (unsigned shares = rng() % 4; shares > 0; --shares) {
      const int64_t from = rng() % 4, to = rng() % 4;
      b.page(to, rng() % b.live(to)) = b.page(from, rng() % b.live(from));
    }
    bool clash = false;
    for (int64_t s = 0; s < 4; ++s) {
      const int64_t q_len = b.cu_q_lens[s + 1] - b.cu_q_lens[s];
      if (q_len == 0) continue;
      for (int64_t i = (b.kv_lens[s] - q_len) / b.page_size; i < b.live(s);
           ++i) {
        for (int64_t t = 0; t < 4; ++t) {
          for (int64_t j = 0; j < b.live(t); ++j) {
            clash |= (s != t || i != j) && b.page(s, i) == b.page(t, j);
          }
        }
      }
    }
    EXPECT_EQ(!b.Check().empty(), clash);
  }
}

TEST(ValidateTest, QueriesNeedKeys) {
  Batch b = Small();
  b.kv_lens[1] = 0;  // with one query token
  EXPECT_EQ(Only(b).code, CheckCode::kQueryExceedsKv);
  b.cu_q_lens[2] = 8;  // with none
  EXPECT_TRUE(b.Check().empty());
}

TEST(ValidateTest, SlotsBehindTheWindowAreDead) {
  Batch b = Small();
  b.pages_per_seq = 7;
  b.total_num_pages = 14;
  b.kv_lens = {100, 100};
  b.cu_q_lens = {0, 1, 2};
  // The first key in the window is number 68, in slot 4.  Row 0 names a page
  // that row 1 writes, and no page.
  b.page_indices = {13, 99, -1, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
  b.sliding_window = 32;
  EXPECT_EQ(FormatViolations(b.Check()), "no violations");
  b.page(0, 4) = -1;
  EXPECT_EQ(Only(b).index, 4);
  b.page(0, 4) = 13;
  EXPECT_EQ(Only(b).code, CheckCode::kSharedPageWritten);
  b.page(0, 4) = 4;
  for (const int64_t window : {0, 37, 1 << 30}) {  // 37: key 63, in slot 3
    b.sliding_window = window;
    EXPECT_EQ(b.Check().size(), window == 37 ? 0u : 3u);
  }
}

TEST(ValidateTest, ScalarMemoryIsCountedInPaddedRows) {
  Batch b = Small();
  b.smem_budget_bytes = 4 * 128 * 5;
  EXPECT_TRUE(b.Check().empty());
  b.kv_lens.resize(1024);
  b.cu_q_lens.resize(1025);
  b.page_indices.resize(1024 * 2);
  b.smem_budget_bytes = 1 << 19;
  const Violation found = Only(b);
  EXPECT_EQ(found.value, 4 * (1024 * 128 + 1024 + 1152 + 128));
  EXPECT_EQ(found.limit, 1 << 19);
  EXPECT_EQ(found.message().rfind("Used 0.51M of 0.50M smem", 0), 0u)
      << found.message();
  EXPECT_TRUE(b.Check(Level::kStructure).empty());
}

TEST(ValidateTest, TextShowsTheFirstAndCountsTheRest) {
  Batch b = Small();
  b.kv_lens = std::vector<int32_t>(20, -1);
  b.page_indices.assign(40, 0);
  b.cu_q_lens.assign(21, 0);
  b.num_seqs = 20;
  const std::string text = FormatViolations(b.Check());
  EXPECT_EQ(text.rfind("kv_len=-1 must not be negative at sequence 0.", 0), 0u);
  EXPECT_NE(text.find("and 11 more."), std::string::npos) << text;
}

}  // namespace
}  // namespace pagemill
