#include "csrc/core/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "csrc/core/validate.h"

namespace pagemill {
namespace {

std::vector<int32_t> Values(const Int32Array& array) {
  return {array.data(), array.data() + array.size()};
}

struct Fixture {
  std::shared_ptr<PagePool> pool;
  Planner planner;
};

Fixture Make(int64_t pages, int64_t page_size, PlanSizes sizes) {
  std::shared_ptr<PagePool> pool = PagePool::Create(pages, page_size).value();
  return {pool, Planner::Create(pool, sizes).value()};
}

TEST(PlanTest, WritesEveryArray) {
  Fixture f =
      Make(8, 4, {.max_num_tokens = 10, .max_num_seqs = 3, .pages_per_seq = 3});
  const SequenceHandle a = f.pool->Open(), b = f.pool->Open();
  const SequenceHandle both[] = {a, b};
  const int64_t first[] = {5, 2};
  ASSERT_TRUE(f.planner.PlanStep(both, first).ok());
  const int64_t second[] = {3, 1};
  const Plan plan = f.planner.PlanStep(both, second).value();
  EXPECT_EQ(Values(plan.order), (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(Values(plan.kv_lens), (std::vector<int32_t>{3, 8, 0}));
  EXPECT_EQ(Values(plan.cu_q_lens), (std::vector<int32_t>{0, 1, 4, 4}));
  EXPECT_EQ(Values(plan.num_seqs), (std::vector<int32_t>{2}));
  EXPECT_EQ(Values(plan.distribution), (std::vector<int32_t>{1, 1, 2}));
  EXPECT_EQ(Values(plan.page_indices),
            (std::vector<int32_t>{2, 0, 0, 0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(Values(plan.slot_mapping),
            (std::vector<int32_t>{10, 5, 6, 7, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(plan.kv_lens.data()) % 64, 0u);
}

TEST(PlanTest, IdleStep) {
  Fixture f =
      Make(8, 4, {.max_num_tokens = 2, .max_num_seqs = 1, .pages_per_seq = 1});
  const Plan plan = f.planner.PlanStep({}, {}).value();
  EXPECT_EQ(Values(plan.num_seqs), (std::vector<int32_t>{0}));
  EXPECT_EQ(Values(plan.cu_q_lens), (std::vector<int32_t>{0, 0}));
  EXPECT_TRUE(Validate(plan.View(*f.pool), Level::kFull).empty());
}

TEST(PlanTest, RefusesWhatDoesNotFit) {
  Fixture f = Make(
      64, 4, {.max_num_tokens = 10, .max_num_seqs = 2, .pages_per_seq = 2});
  const SequenceHandle seqs[] = {f.pool->Open(), f.pool->Open(),
                                 f.pool->Open()};
  const auto refused = [&](std::vector<SequenceHandle> handles,
                           std::vector<int64_t> counts) {
    const Status status = f.planner.PlanStep(handles, counts).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(f.pool->num_free_pages(), 64);
    return status.message();
  };
  EXPECT_NE(
      refused({seqs[0], seqs[1], seqs[2]}, {1, 1, 1}).find("max_num_seqs=2"),
      std::string::npos);
  EXPECT_NE(refused({seqs[0], seqs[1]}, {6, 5}).find("max_num_tokens=10"),
            std::string::npos);
  EXPECT_NE(refused({seqs[0]}, {INT64_MAX}).find("max_num_tokens=10"),
            std::string::npos);
  EXPECT_NE(refused({seqs[0]}, {9}).find("pages_per_seq=2"), std::string::npos);
  EXPECT_NE(refused({seqs[0]}, {0}).find("at least 1"), std::string::npos);
  EXPECT_NE(refused({seqs[0]}, {INT64_MIN}).find("at least 1"),
            std::string::npos);
  EXPECT_NE(refused({seqs[0], seqs[0]}, {1, 1}).find("twice"),
            std::string::npos);
}

TEST(PlanTest, RefusesBadSizes) {
  auto pool = std::shared_ptr<PagePool>(PagePool::Create(4, 4).value());
  EXPECT_FALSE(Planner::Create(pool, {0, 1, 1}).ok());
  EXPECT_FALSE(Planner::Create(pool, {1, -1, 1}).ok());
  EXPECT_FALSE(Planner::Create(pool, {1, 1 << 20, 1 << 12}).ok());
}

TEST(PlanTest, EveryPlanIsValid) {
  std::mt19937 rng(5);
  for (int run = 0; run < 40; ++run) {
    const int64_t page_size = 1 + run % 7;
    Fixture f =
        Make(40, page_size,
             {.max_num_tokens = 30, .max_num_seqs = 6, .pages_per_seq = 10});
    std::vector<SequenceHandle> live;
    int planned = 0;
    for (int step = 0; step < 60; ++step) {
      while (live.size() < 6) live.push_back(f.pool->Open());
      if (rng() % 4 == 0) {
        ASSERT_TRUE(f.pool->Close(live.back()).ok());
        live.pop_back();
        const Result<SequenceHandle> fork = f.pool->Fork(live[0]);
        if (fork.ok()) live.push_back(fork.value());
        f.pool->TakePageCopies();
      }
      std::shuffle(live.begin(), live.end(), rng);
      std::vector<SequenceHandle> chosen(live.begin(),
                                         live.begin() + rng() % live.size());
      std::vector<int64_t> counts;
      for (size_t i = 0; i < chosen.size(); ++i)
        counts.push_back(1 + rng() % 5);
      const Result<Plan> plan = f.planner.PlanStep(chosen, counts);
      if (!plan.ok()) {
        ASSERT_TRUE(f.pool->Close(live.back()).ok());
        live.pop_back();
        continue;
      }
      ++planned;
      const auto found = Validate(plan.value().View(*f.pool), Level::kFull);
      ASSERT_TRUE(found.empty()) << FormatViolations(found);
    }
    EXPECT_GT(planned, 20);
  }
}

}  // namespace
}  // namespace pagemill
