#include "csrc/core/attention/ragged_paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/attention/test_batch.h"
#include "csrc/core/executor.h"
#include "csrc/core/thread_executor.h"
#include "gtest/gtest.h"

namespace pagemill {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Of unit-variance inputs; bf16 also rounds the result itself.
double Tolerance(DType dtype) { return dtype == DType::kF32 ? 5e-6 : 1e-2; }

// Every test runs on each instruction set that this machine has.
class AttentionTest : public testing::TestWithParam<std::string_view> {
 protected:
  void Run(TestBatch& batch) { Run(batch, inline_executor_); }

  void Run(TestBatch& batch, Executor& executor) {
    const Status status =
        RaggedPagedAttention(batch.Args(), executor, GetParam());
    ASSERT_TRUE(status.ok()) << status.message();
  }

  // Runs and compares with the reference; dead rows must be 0.
  void Check(TestBatch& batch) {
    Run(batch);
    for (int64_t s = 0; s < batch.num_seqs(); ++s) CheckSequence(batch, s);
    for (int64_t i = batch.live_rows() * batch.row_size(); i < batch.out.size();
         ++i) {
      ASSERT_EQ(batch.out.BitsAt(i), 0u) << "dead element " << i;
    }
    for (int64_t i = batch.live_rows() * batch.shape().num_q_heads;
         i < std::ssize(batch.lse); ++i) {
      ASSERT_EQ(batch.lse[i], -kInfinity) << "dead lse " << i;
    }
  }

  void CheckSequence(TestBatch& batch, int64_t seq) {
    const std::vector<double> expected = batch.Reference(seq);
    const int64_t begin = batch.q_begin(seq) * batch.row_size();
    const double tolerance = Tolerance(batch.shape().dtype);
    for (size_t i = 0; i < expected.size(); ++i) {
      const double scale = std::max(1.0, std::abs(expected[i]));
      ASSERT_NEAR(batch.out.Get(begin + i), expected[i], tolerance * scale)
          << "sequence " << seq << ", element " << i;
    }
    CheckLse(batch, seq);
  }

  void CheckLse(TestBatch& batch, int64_t seq) {
    const int64_t heads = batch.shape().num_q_heads;
    for (int64_t i = 0; i < batch.shape().sequences[seq].q_len; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        const double expected = batch.ReferenceLse(seq, i, head);
        const float found = batch.lse[(batch.q_begin(seq) + i) * heads + head];
        if (std::isinf(expected)) {
          ASSERT_EQ(found, expected);
        } else {
          ASSERT_NEAR(found, expected, 5e-6 * std::max(1.0, std::abs(expected)))
              << "sequence " << seq << ", query " << i << ", head " << head;
        }
      }
    }
  }

  InlineExecutor inline_executor_;
};

std::vector<uint32_t> Bits(const TestBatch& batch, int64_t first_row,
                           int64_t num_rows) {
  std::vector<uint32_t> bits;
  const int64_t row = batch.row_size();
  for (int64_t i = first_row * row; i < (first_row + num_rows) * row; ++i) {
    bits.push_back(batch.out.BitsAt(i));
  }
  return bits;
}

TestShape RandomShape(std::mt19937& random) {
  const auto pick = [&](std::vector<int64_t> from) {
    return from[random() % from.size()];
  };
  TestShape shape;
  shape.num_kv_heads = pick({1, 2, 3});
  shape.num_q_heads = shape.num_kv_heads * pick({1, 2, 3, 4, 5, 7, 8, 9});
  shape.head_dim = pick({1, 3, 8, 16, 31, 40, 64, 80, 128, 130});
  shape.page_size = pick({1, 2, 7, 16, 64, 100});
  shape.dtype = random() % 2 ? DType::kF32 : DType::kBF16;
  shape.sm_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  shape.soft_cap = static_cast<float>(pick({0, 0, 1, 5, 50}));
  shape.sliding_window = pick({0, 0, 1, 3, 16, 63, 64, 65, 1000});
  shape.causal = random() % 4 != 0;
  shape.layout = static_cast<KvLayout>(random() % 3);
  const std::optional<DType> kv_dtypes[] = {
      std::nullopt, std::nullopt, DType::kF8E4M3, DType::kF8E5M2, DType::kI8};
  shape.kv_dtype = kv_dtypes[random() % 5];
  shape.sinks = random() % 3 == 0;
  shape.scales = random() % 3 == 0;
  shape.tree_words = pick({0, 0, 0, 1, 3});
  shape.dead_rows = pick({0, 1, 5});
  shape.dead_seqs = pick({0, 3});
  for (int64_t n = pick({1, 2, 5}); n > 0; --n) {
    const int64_t kv_len = pick({1, 2, 15, 16, 17, 63, 64, 65, 128, 200});
    const int64_t q_len = pick({0, 1, 1, 2, 5, 30, 70});
    shape.sequences.push_back({std::min(q_len, kv_len), kv_len});
  }
  return shape;
}

TEST_P(AttentionTest, EqualsTheReferenceOverRandomShapesAndOptions) {
  std::mt19937 random(1);
  for (uint32_t round = 0; round < 160 && !HasFatalFailure(); ++round) {
    SCOPED_TRACE(round);
    TestBatch batch(RandomShape(random), round);
    Check(batch);
  }
}

// C09
TEST_P(AttentionTest, NoSequencesGiveZeros) {
  TestBatch batch({.sequences = {}, .dead_rows = 16}, 0);
  Check(batch);
}

TEST_P(AttentionTest, NoTokensGiveNothing) {
  TestBatch batch({.sequences = {{0, 20}}, .dead_rows = 0}, 0);
  Check(batch);
}

// C07, for callers that check nothing: queries before the first key.
TEST_P(AttentionTest, RowsWithoutAKeyAreZero) {
  for (int64_t window : {0, 2}) {
    TestBatch batch({.sequences = {{8, 4}, {1, 9}}, .sliding_window = window},
                    0);
    Check(batch);
    for (uint32_t bits : Bits(batch, 0, 4)) EXPECT_EQ(bits, 0u);
  }
}

// C17
TEST_P(AttentionTest, ChunksEqualTheWholePrompt) {
  TestShape shape{.sequences = {{24, 24}}, .dead_rows = 0};
  TestBatch whole(shape, 5);
  Check(whole);
  for (const Sequence chunk : {Sequence{10, 10}, {3, 13}, {11, 24}}) {
    shape.sequences = {{29, 29}, chunk};
    TestBatch batch(shape, 6, {1, 0});
    // The prompt's queries and keys, at the very end of the token buffer.
    const int64_t first = chunk.kv_len - chunk.q_len;
    for (int64_t i = 0; i < chunk.q_len * batch.row_size(); ++i) {
      batch.q.Set(29 * batch.row_size() + i,
                  whole.q.Get(first * batch.row_size() + i));
    }
    for (int64_t key = 0; key < chunk.kv_len; ++key) {
      for (int64_t i = 0; i < 2 * shape.num_kv_heads * shape.head_dim; ++i) {
        batch.kv_pages.Set(batch.KeyOffset(1, key, 0) + i,
                           whole.kv_pages.Get(whole.KeyOffset(0, key, 0) + i));
      }
    }
    Check(batch);
    for (int64_t i = 0; i < chunk.q_len * batch.row_size(); ++i) {
      ASSERT_NEAR(batch.out.Get(29 * batch.row_size() + i),
                  whole.out.Get(first * batch.row_size() + i), 1e-5);
    }
  }
}

// C19
TEST_P(AttentionTest, DeadQueriesDoNotSpread) {
  std::vector<uint32_t> expected;
  for (float poison : {0.0f, kNan, kInfinity}) {
    TestBatch batch({.sequences = {{8, 20}, {1, 9}}, .dead_rows = 7}, 0);
    for (int64_t i = batch.live_rows() * batch.row_size(); i < batch.q.size();
         ++i) {
      batch.q.Set(i, poison);
    }
    Check(batch);
    const std::vector<uint32_t> bits = Bits(batch, 0, batch.live_rows());
    if (expected.empty()) expected = bits;
    EXPECT_EQ(bits, expected);
  }
}

// C24
TEST_P(AttentionTest, WindowsStartAnywhere) {
  for (int64_t head_dim : {64, 128}) {
    std::vector<uint32_t> unlimited;
    for (int64_t window :
         {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{16}, int64_t{17},
          int64_t{100}, int64_t{101}, std::numeric_limits<int64_t>::max()}) {
      SCOPED_TRACE(window);
      TestBatch batch({.sequences = {{1, 100}, {9, 100}},
                       .head_dim = head_dim,
                       .sliding_window = window},
                      0);
      Check(batch);
      const std::vector<uint32_t> bits = Bits(batch, 0, 10);
      if (window == 0) unlimited = bits;
      if (window >= 100) {
        EXPECT_EQ(bits, unlimited);
      }
    }
  }
}

// C26
TEST_P(AttentionTest, VeryNegativeLogitsAreLogits) {
  for (const Sequence sequence : {Sequence{1, 20}, {5, 150}, {12, 150}}) {
    for (int64_t window : {0, 4}) {
      TestBatch batch({.sequences = {sequence},
                       .head_dim = 128,
                       .sm_scale = 1.0f,
                       .sliding_window = window},
                      0);
      for (int64_t i = 0; i < batch.live_rows() * batch.row_size(); ++i) {
        batch.q.Set(i, 448.0f);
      }
      const int64_t seen_from =
          window == 0 ? 0 : sequence.kv_len - sequence.q_len + 1 - window;
      for (int64_t key = 0; key < sequence.kv_len; ++key) {
        for (int64_t head = 0; head < 2; ++head) {
          for (int64_t d = 0; d < 128; ++d) {
            batch.kv_pages.Set(batch.KeyOffset(0, key, head) + d,
                               key < seen_from ? 1880.0f : -1880.0f);
          }
        }
      }
      Check(batch);
    }
  }
}

TEST_P(AttentionTest, MaskedKeysAndValuesMayBeAnything) {
  // Query 0 does not see the last keys, the last query not the first ones.
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const TestShape shape{
        .sequences = {{20, 90}}, .dtype = dtype, .sliding_window = 30};
    TestBatch clean(shape, 0);
    Check(clean);
    for (float poison : {kNan, kInfinity, -kInfinity}) {
      TestBatch batch(shape, 0);
      for (int64_t key : {45, 88}) {
        for (int64_t i = 0; i < 4 * shape.head_dim; ++i) {
          batch.kv_pages.Set(batch.KeyOffset(0, key, 0) + i, poison);
        }
      }
      Run(batch);
      // Positions 70..89; key 45 is seen up to 74, key 88 from 88 on.
      EXPECT_EQ(Bits(batch, 5, 13), Bits(clean, 5, 13));
      EXPECT_TRUE(std::isnan(batch.out.Get(0)));
    }
  }
}

TEST_P(AttentionTest, LiveNanShows) {
  for (int64_t q_len : {1, 20}) {
    TestBatch batch({.sequences = {{q_len, 40}}}, 0);
    batch.q.Set(0, kNan);
    Run(batch);
    EXPECT_TRUE(std::isnan(batch.out.Get(0)));
    EXPECT_FALSE(std::isnan(batch.out.Get(batch.shape().head_dim)));
  }
}

// C28
TEST_P(AttentionTest, NeighboursDoNotMatter) {
  const TestShape base{
      .sequences = {}, .num_q_heads = 8, .dtype = DType::kBF16};
  TestShape alone = base;
  alone.sequences = {{5, 37}};
  TestBatch single(alone, 3, {99});
  Run(single);
  const std::vector<uint32_t> expected = Bits(single, 0, 5);
  for (size_t place : {0, 7, 15}) {
    std::mt19937 random(place);
    TestShape shape = base;
    std::vector<uint32_t> keys;
    for (size_t s = 0; s < 16; ++s) {
      const int64_t kv_len = 1 + random() % 150;
      shape.sequences.push_back(
          {1 + static_cast<int64_t>(random() % kv_len), kv_len});
      keys.push_back(s);
    }
    shape.sequences[place] = {5, 37};
    keys[place] = 99;
    TestBatch batch(shape, 3, keys);
    Run(batch);
    EXPECT_EQ(Bits(batch, batch.q_begin(place), 5), expected);
  }
}

TEST_P(AttentionTest, ThreadsDoNotMatter) {
  TestShape shape{.sequences = {}, .num_q_heads = 8, .head_dim = 64};
  for (int64_t i = 0; i < 10; ++i) {
    shape.sequences.push_back({1 + i * 17 % 90, 150 + i * 31});
  }
  TestBatch expected(shape, 0);
  Check(expected);
  for (int64_t threads : {1, 2, 7}) {
    ThreadExecutor executor(threads);
    for (int repeat = 0; repeat < 3; ++repeat) {
      TestBatch batch(shape, 0);
      Run(batch, executor);
      EXPECT_EQ(Bits(batch, 0, batch.live_rows()),
                Bits(expected, 0, batch.live_rows()));
    }
  }
}

TEST_P(AttentionTest, GroupsMayBeWide) {
  for (int64_t group : {16, 17, 200}) {
    TestBatch batch({.sequences = {{1, 70}, {3, 70}},
                     .num_q_heads = 2 * group,
                     .num_kv_heads = 2,
                     .head_dim = 24},
                    0);
    Check(batch);
  }
}

// C22
TEST_P(AttentionTest, PositionsPastInt16) {
  for (int64_t kv_len : {32767, 32768, 32769, 70000}) {
    TestBatch batch({.sequences = {{2, kv_len}, {1, 5}},
                     .num_q_heads = 2,
                     .num_kv_heads = 1,
                     .head_dim = 16,
                     .page_size = 256,
                     .sliding_window = 512},
                    0);
    Check(batch);
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, AttentionTest,
                         testing::ValuesIn(AvailableIsas()),
                         [](const auto& info) {
                           return std::string(info.param);
                         });

class NoThreadsExecutor final : public Executor {
 public:
  int64_t num_threads() const override { return 64; }
  void Schedule(std::function<void()> task) override {
    ++num_scheduled;
    task();
  }
  int64_t num_scheduled = 0;
};

TEST(SchedulingTest, SmallCallsWakeNobody) {
  NoThreadsExecutor executor;
  TestBatch batch({.sequences = {{1, 64}},
                   .num_q_heads = 32,
                   .num_kv_heads = 8,
                   .head_dim = 128},
                  0);
  ASSERT_TRUE(RaggedPagedAttention(batch.Args(), executor, "portable").ok());
  EXPECT_EQ(executor.num_scheduled, 0);
}

TEST(IsaTest, UnknownOneIsAnErrorThatListsTheOthers) {
  InlineExecutor executor;
  TestBatch batch({.sequences = {{1, 4}}}, 0);
  const Status status = RaggedPagedAttention(batch.Args(), executor, "mmx");
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("PAGEMILL_CPU_ISA=mmx"), std::string::npos);
  for (std::string_view isa : AvailableIsas()) {
    EXPECT_NE(status.message().find(isa), std::string::npos);
  }
}

}  // namespace
}  // namespace pagemill
