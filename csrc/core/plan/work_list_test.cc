#include "csrc/core/plan/work_list.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace pagemill {
namespace {

using Ints = std::vector<int32_t>;
using Item = std::array<int32_t, kWorkItemSize>;

struct Batch {
  Ints kv_lens, cu_q_lens = {0};
  int64_t page_size = 4;

  void Add(int32_t q_len, int32_t kv_len) {
    kv_lens.push_back(kv_len);
    cu_q_lens.push_back(cu_q_lens.back() + q_len);
  }
  BatchView View() const {
    return {.kv_lens = kv_lens.data(),
            .cu_q_lens = cu_q_lens.data(),
            .num_seqs = static_cast<int64_t>(kv_lens.size()),
            .max_num_seqs = static_cast<int64_t>(kv_lens.size()),
            .page_size = page_size};
  }
};

std::vector<Item> Write(const Batch& batch, const WorkOptions& options,
                        int64_t padding = 0) {
  EXPECT_TRUE(CheckWorkOptions(batch.View(), options).ok());
  const int64_t count = CountWork(batch.View(), options) + padding;
  Ints flat(count * kWorkItemSize, -77);
  WriteWork(batch.View(), options, flat);
  std::vector<Item> items(count);
  for (size_t i = 0; i < flat.size(); ++i) {
    items[i / kWorkItemSize][i % kWorkItemSize] = flat[i];
  }
  return items;
}

TEST(WorkListTest, DecodeAndChunkWithPadding) {
  Batch batch;
  batch.Add(1, 10);
  batch.Add(0, 3);
  batch.Add(5, 9);  // positions 4 to 8
  EXPECT_EQ(Write(batch, {.q_block = 4, .kv_block = 4}, 1),
            (std::vector<Item>{{0, 0, 1, 0, 10, 3},
                               {2, 1, 5, 0, 8, 3},
                               {2, 5, 6, 0, 9, 3},
                               {-1, 0, 0, 0, 0, 0}}));
}

TEST(WorkListTest, WindowsBeginAtABlock) {
  Batch batch;
  batch.Add(1, 10);
  // Position 9 keeps 7, 8 and 9.
  EXPECT_EQ(Write(batch, {.q_block = 1, .kv_block = 4, .sliding_window = 3}),
            (std::vector<Item>{{0, 0, 1, 4, 10, 3}}));
  EXPECT_EQ(Write(batch, {.q_block = 1, .kv_block = 4, .sliding_window = 2}),
            (std::vector<Item>{{0, 0, 1, 8, 10, 3}}));
}

TEST(WorkListTest, LongKvIsSplit) {
  Batch batch;
  batch.Add(1, 17);
  EXPECT_EQ(
      Write(batch, {.q_block = 8, .kv_block = 4, .max_kv_per_item = 8}),
      (std::vector<Item>{
          {0, 0, 1, 0, 8, 1}, {0, 0, 1, 8, 16, 0}, {0, 0, 1, 16, 17, 2}}));
}

TEST(WorkListTest, RefusesOptions) {
  const Batch batch;
  const auto refused = [&](const WorkOptions& options, const char* why) {
    const Status status = CheckWorkOptions(batch.View(), options);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().find(why), 0u) << status.message();
  };
  refused({.q_block = 0, .kv_block = 4}, "q_block=0 must be in range [1, ");
  refused({.q_block = 1, .kv_block = 6},
          "kv_block=6 must be a multiple of page_size=4. Round it up to 8.");
  refused({.q_block = 1, .kv_block = 8, .max_kv_per_item = 12},
          "max_kv_per_item=12 must be a multiple of kv_block=8");
  refused({.q_block = 1, .kv_block = 4, .sliding_window = -1},
          "sliding_window=-1");
}

bool Visible(const WorkOptions& options, int64_t position, int64_t key) {
  return (!options.causal || key <= position) &&
         (options.sliding_window == 0 ||
          key > position - options.sliding_window);
}

// Every visible pair is in one item, and every block of every item has one.
void ExpectExact(const Batch& batch, const WorkOptions& options) {
  const BatchView view = batch.View();
  std::map<std::pair<int64_t, int64_t>, int> covered;  // token and key
  for (const auto& [row, q_begin, q_end, kv_begin, kv_end, flags] :
       Write(batch, options)) {
    ASSERT_LE(q_end - q_begin, options.q_block);
    ASSERT_EQ(kv_begin % options.kv_block, 0);
    ASSERT_LE(kv_end, view.kv_len(row));
    if (options.max_kv_per_item > 0) {
      ASSERT_LE(kv_end - kv_begin, options.max_kv_per_item);
    }
    std::map<int64_t, int> in_block;
    for (int64_t q = q_begin; q < q_end; ++q) {
      const int64_t position =
          view.kv_len(row) - view.q_len(row) + q - view.q_begin(row);
      for (int64_t key = kv_begin; key < kv_end; ++key) {
        if (!Visible(options, position, key)) continue;
        ++covered[{q, key}];
        ++in_block[key / options.kv_block];
      }
    }
    const int64_t blocks =
        (kv_end - kv_begin + options.kv_block - 1) / options.kv_block;
    ASSERT_EQ(static_cast<int64_t>(in_block.size()), blocks);
  }
  size_t pairs = 0;
  for (int64_t row = 0; row < view.num_seqs; ++row) {
    for (int64_t q = 0; q < view.q_len(row); ++q) {
      for (int64_t key = 0; key < view.kv_len(row); ++key) {
        pairs += Visible(options, view.kv_len(row) - view.q_len(row) + q, key);
      }
    }
  }
  ASSERT_EQ(covered.size(), pairs);
  for (const auto& [pair, times] : covered) ASSERT_EQ(times, 1);
}

TEST(WorkListTest, CoversWhatIsVisibleOnce) {
  std::mt19937 random(0);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int round = 0; round < 400; ++round) {
    Batch batch;
    batch.page_size = draw(1, 4);
    for (int row = draw(0, 4); row > 0; --row) {
      const int kv_len = draw(0, 40);
      batch.Add(draw(0, kv_len), kv_len);
    }
    const int64_t kv_block = batch.page_size * draw(1, 3);
    ExpectExact(batch, {.q_block = draw(1, 12),
                        .kv_block = kv_block,
                        .causal = draw(0, 1) == 1,
                        .sliding_window = draw(0, 2) == 0 ? 0 : draw(1, 20),
                        .max_kv_per_item = kv_block * draw(0, 3)});
  }
}

}  // namespace
}  // namespace pagemill
