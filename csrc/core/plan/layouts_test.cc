#include "csrc/core/plan/layouts.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pagemill {
namespace {

using Ints = std::vector<int32_t>;

constexpr int32_t kDead = -77;  // what dead entries hold, and outputs before

// Rows of 5 tokens (2 new) on pages 7 3, of none, of 4 (1 new) on page 2, and a
// dead one.
struct Example {
  Ints kv_lens = {5, 0, 4, kDead};
  Ints page_indices = {7, 3,     kDead, kDead, kDead, kDead,
                       2, kDead, kDead, kDead, kDead, kDead};
  Ints cu_q_lens = {0, 2, 2, 3, kDead};

  BatchView View() const {
    return {.kv_lens = kv_lens.data(),
            .page_indices = page_indices.data(),
            .cu_q_lens = cu_q_lens.data(),
            .num_seqs = 3,
            .max_num_seqs = 4,
            .pages_per_seq = 3,
            .page_size = 4,
            .total_num_pages = 8,
            .max_num_tokens = 5};
  }
};

TEST(LayoutsTest, Flat) {
  Ints table(12, kDead);
  WriteFlat(Example().View(), table);
  EXPECT_EQ(table, (Ints{7, 3, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0}));
}

TEST(LayoutsTest, RaggedByPageAlignedSums) {
  Ints sums(5, kDead), pages(4, kDead);
  const Example example;
  ASSERT_TRUE(WriteRagged(example.View(), sums, pages).ok());
  EXPECT_EQ(sums, (Ints{0, 8, 8, 12, 12}));
  EXPECT_EQ(pages, (Ints{7, 3, 2, 0}));
}

TEST(LayoutsTest, IndptrWithAFullLastPageAndAnEmptyRow) {
  Ints indptr(5, kDead), last(4, kDead), pages(3, kDead);
  const Example example;
  ASSERT_TRUE(WriteIndptr(example.View(), indptr, last, pages).ok());
  EXPECT_EQ(indptr, (Ints{0, 2, 2, 3, 3}));
  EXPECT_EQ(last, (Ints{1, 0, 4, 0}));
  EXPECT_EQ(pages, (Ints{7, 3, 2}));
}

TEST(LayoutsTest, RefusesACapacityThatIsTooSmall) {
  Ints sums(5), last(4), pages(2, kDead);
  const Example example;
  EXPECT_EQ(CountPages(example.View()), 3);
  for (const Status& status :
       {WriteRagged(example.View(), sums, pages),
        WriteIndptr(example.View(), sums, last, pages)}) {
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(status.message().find("capacity=2 must be at least 3"), 0u);
    EXPECT_NE(status.message().find("max_num_seqs * pages_per_seq=12"),
              std::string::npos);
  }
  EXPECT_EQ(pages, (Ints{kDead, kDead}));
}

TEST(LayoutsTest, RefusesASumThatInt32CannotHold) {
  // Three sequences read the same page.
  const int32_t page_size = 1 << 30;
  const Ints kv_lens(3, page_size), table(3, 0), cu_q_lens(4, 0);
  const BatchView batch = {.kv_lens = kv_lens.data(),
                           .page_indices = table.data(),
                           .cu_q_lens = cu_q_lens.data(),
                           .num_seqs = 3,
                           .max_num_seqs = 3,
                           .pages_per_seq = 1,
                           .page_size = page_size,
                           .total_num_pages = 1,
                           .max_num_tokens = 1};
  Ints sums(4), pages(3);
  const Status status = WriteRagged(batch, sums, pages);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("3221225472"), std::string::npos);
}

TEST(LayoutsTest, SlotMapping) {
  Ints slots(5, kDead);
  WriteSlotMapping(Example().View(), slots);
  EXPECT_EQ(slots, (Ints{31, 12, 11, -1, -1}));
}

TEST(LayoutsTest, IdleBatch) {
  Example example;
  BatchView idle = example.View();
  idle.num_seqs = 0;
  Ints sums(5, kDead), pages;
  ASSERT_TRUE(WriteRagged(idle, sums, pages).ok());
  EXPECT_EQ(sums, Ints(5, 0));
}

}  // namespace
}  // namespace pagemill
