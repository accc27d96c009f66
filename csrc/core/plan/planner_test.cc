#include "csrc/core/plan/planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/core/validate.h"

namespace pagemill {
namespace {

struct Fixture {
  std::shared_ptr<PagePool> pool;
  std::unique_ptr<Planner> planner;

  SequenceHandle Open() { return pool->Open({}, {}).handle; }
  // Plans, commits and retires; the buffer that holds the step.
  const StepBuffer& Run(const std::vector<SequenceHandle>& handles,
                        const std::vector<int32_t>& counts) {
    const Planned planned = planner->Step(handles, counts).value();
    EXPECT_TRUE(planner->Commit(planned.buffer, {}).ok());
    EXPECT_TRUE(planner->Retire(planned.buffer).ok());
    return planner->buffer(planned.buffer);
  }
};

Fixture Make(int64_t pages, int64_t page_size, PlannerOptions options,
             std::vector<int64_t> windows = {0}) {
  std::shared_ptr<PagePool> pool =
      PagePool::Create({.total_num_pages = pages,
                        .page_size = page_size,
                        .sliding_windows = std::move(windows)})
          .value();
  return {pool, Planner::Create(pool, std::move(options)).value()};
}

std::vector<int32_t> Values(const StepBuffer& buffer, Field field) {
  const int32_t* data = buffer.field(field);
  return {data, data + buffer.layout()[field].size};
}

using Ints = std::vector<int32_t>;
using Ints64 = std::vector<int64_t>;

TEST(PlannerTest, WritesEveryArray) {
  Fixture f = Make(8, 4, {.sizes = {10, 3, 3}});
  const SequenceHandle a = f.Open(), b = f.Open();
  f.Run({a, b}, {5, 2});
  const StepBuffer& step = f.Run({a, b}, {3, 1});
  EXPECT_EQ(step.order, (Ints{1, 0}));
  EXPECT_EQ(Values(step, Field::kKvLens), (Ints{3, 8, 0}));
  EXPECT_EQ(Values(step, Field::kCuQLens), (Ints{0, 1, 4, 4}));
  EXPECT_EQ(Values(step, Field::kNumSeqs), (Ints{2}));
  EXPECT_EQ(Values(step, Field::kDistribution), (Ints{1, 1, 2}));
  EXPECT_EQ(Values(step, Field::kPageIndices),
            (Ints{2, 0, 0, 0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(Values(step, Field::kSlotMapping),
            (Ints{10, 5, 6, 7, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(Values(step, Field::kPositions),
            (Ints{2, 5, 6, 7, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(Values(step, Field::kLogitsIndices), (Ints{0, 3, 0}));
  for (const Field field : {Field::kKvLens, Field::kPageIndices}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(step.field(field)) % 128, 0u);
  }
}

TEST(PlannerTest, IdleStepLeavesNothingBehind) {
  Fixture f = Make(8, 4, {.sizes = {4, 2, 2}});
  f.Run({f.Open(), f.Open()}, {3, 1});
  const StepBuffer& step = f.Run({}, {});
  EXPECT_EQ(Values(step, Field::kNumSeqs), (Ints{0}));
  EXPECT_EQ(Values(step, Field::kCuQLens), (Ints{0, 0, 0}));
  EXPECT_EQ(Values(step, Field::kKvLens), (Ints{0, 0}));
  EXPECT_EQ(Values(step, Field::kPageIndices), (Ints{0, 0, 0, 0}));
  EXPECT_EQ(Values(step, Field::kSlotMapping), (Ints{-1, -1, -1, -1}));
  EXPECT_TRUE(Validate(step.View(0, 2, 4), Level::kFull).empty());
}

TEST(PlannerTest, PrefillChunksFormARange) {
  Fixture f = Make(64, 4, {.sizes = {40, 5, 8}, .prefill_chunk = 8});
  const StepBuffer& step = f.Run(
      {f.Open(), f.Open(), f.Open(), f.Open(), f.Open()}, {3, 8, 1, 5, 8});
  EXPECT_EQ(step.order, (Ints{2, 1, 4, 0, 3}));
  EXPECT_EQ(Values(step, Field::kDistribution), (Ints{1, 3, 5}));
}

TEST(PlannerTest, KeepsRowsWhereDecodesStillComeFirst) {
  Fixture f = Make(64, 4, {.sizes = {16, 4, 8}, .keep_rows = true});
  const SequenceHandle a = f.Open(), b = f.Open(), c = f.Open(), d = f.Open();
  f.Run({a, b, c}, {1, 1, 1});
  EXPECT_EQ(f.Run({b, c, d}, {1, 1, 5}).order, (Ints{1, 0, 2}));
  // c keeps row 0 and d row 2; b has to make room for nobody.
  EXPECT_EQ(f.Run({d, c, b}, {1, 1, 1}).order, (Ints{1, 2, 0}));
}

TEST(PlannerTest, ALeasedBufferIsNotTouched) {
  Fixture f = Make(64, 4, {.sizes = {8, 2, 8}, .ring = 2});
  const SequenceHandle a = f.Open();
  const int32_t one = 1;
  const auto plan = [&] { return f.planner->Step({&a, 1}, {&one, 1}); };
  const Planned first = plan().value();
  const Ints kept = Values(f.planner->buffer(first.buffer), Field::kKvLens);
  ASSERT_TRUE(f.planner->Commit(first.buffer, {}).ok());
  const Planned second = plan().value();
  EXPECT_NE(first.buffer, second.buffer);
  ASSERT_TRUE(f.planner->Commit(second.buffer, {}).ok());
  EXPECT_EQ(plan().status().code(), StatusCode::kUnavailable);
  EXPECT_EQ(f.pool->Length(a).value(), 2);
  EXPECT_EQ(Values(f.planner->buffer(first.buffer), Field::kKvLens), kept);
  ASSERT_TRUE(f.planner->Retire(first.buffer).ok());
  EXPECT_FALSE(f.planner->Retire(first.buffer).ok());
  EXPECT_FALSE(f.planner->Commit(first.buffer, {}).ok());
  EXPECT_EQ(plan().value().buffer, first.buffer);
}

TEST(PlannerTest, RefusesWhatDoesNotFit) {
  Fixture f = Make(64, 4, {.sizes = {10, 2, 2}});
  const SequenceHandle seqs[] = {f.Open(), f.Open(), f.Open()};
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const auto refused = [&](std::vector<SequenceHandle> handles,
                           std::vector<int32_t> counts, const char* why) {
    const Status status = f.planner->Step(handles, counts).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(why), std::string::npos)
        << status.message();
    EXPECT_EQ(f.planner->Check(handles, counts).message(), status.message());
    EXPECT_EQ(f.pool->num_free_pages(), 64);
  };
  refused({seqs[0], seqs[1], seqs[2]}, {1, 1, 1}, "max_num_seqs=2");
  refused({seqs[0], seqs[1]}, {6, 5}, "max_num_tokens=10");
  refused({seqs[0]}, {kMost}, "max_num_tokens=10");
  refused({seqs[0]}, {9}, "pages_per_seq=2");
  refused({seqs[0]}, {0}, "at least 1");
  refused({seqs[0]}, {-kMost}, "at least 1");
  refused({seqs[0], seqs[0]}, {1, 1}, "twice");
  refused({seqs[0], int64_t{1} << 40}, {1, 1}, "requests[1]");
  refused({seqs[0], 4711}, {1, 1}, "requests[1]");
  refused({seqs[0]}, {1, 1}, "differ in length");
}

TEST(PlannerTest, CheckChangesNothing) {
  Fixture f = Make(3, 4, {.sizes = {16, 2, 4}, .ring = 1});
  // The cached pages of a closed sequence, which a step may evict.
  const Ints tokens(8, 7);
  const SequenceHandle cached = f.pool->Open(tokens, {}).handle;
  f.Run({cached}, {8});
  ASSERT_TRUE(f.pool->Close(cached).ok());
  const SequenceHandle a = f.Open(), b = f.Open();
  EXPECT_TRUE(f.planner->Check(Ints64{b, a}, Ints{4, 8}).ok());
  const Status status = f.planner->Check(Ints64{b, a}, Ints{4, 9});
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.shortage().need, 4);
  EXPECT_EQ(f.pool->Length(a).value(), 0);
  EXPECT_EQ(f.pool->Stats().evictions, 0);
  EXPECT_EQ(f.pool->Probe(tokens, {}), 4);
  const Planned step = f.planner->Step(Ints64{a}, Ints{1}).value();
  EXPECT_EQ(f.planner->Check(Ints64{a}, Ints{1}).code(),
            StatusCode::kUnavailable);
  EXPECT_TRUE(f.planner->Abort(step.buffer).ok());
}

TEST(PlannerTest, RefusesBadOptions) {
  const std::shared_ptr<PagePool> pool =
      PagePool::Create({.total_num_pages = 4, .page_size = 4}).value();
  const auto made = [&](PlannerOptions options) {
    return Planner::Create(pool, std::move(options)).ok();
  };
  EXPECT_TRUE(made({.sizes = {8, 4, 1}, .token_buckets = {2, 8}}));
  EXPECT_FALSE(made({.sizes = {0, 1, 1}}));
  EXPECT_FALSE(made({.sizes = {1, -1, 1}}));
  EXPECT_FALSE(made({.sizes = {1, 1 << 20, 1 << 12}}));
  EXPECT_FALSE(made({.sizes = {8, 4, 1}, .ring = 0}));
  EXPECT_FALSE(made({.sizes = {8, 4, 1}, .token_buckets = {8, 2}}));
  EXPECT_FALSE(made({.sizes = {8, 4, 1}, .seq_buckets = {2}}));
  EXPECT_FALSE(made({.sizes = {8, 4, 1}, .prefill_chunk = 9}));
}

// A step's arrays from scratch.
void ExpectAsRebuilt(const Fixture& f, const StepBuffer& step,
                     const PlanSizes& sizes) {
  const PagePool& pool = *f.pool;
  const int64_t page_size = pool.page_size(), groups = pool.num_groups();
  Ints kv_lens(sizes.max_num_seqs), cu_q_lens(sizes.max_num_seqs + 1);
  Ints positions(sizes.max_num_tokens);
  Ints slots(groups * sizes.max_num_tokens, -1);
  Ints table(groups * sizes.max_num_seqs * sizes.pages_per_seq);
  for (size_t row = 0; row < step.step.handles.size(); ++row) {
    const SequenceHandle handle = step.step.handles[row];
    const int64_t length = pool.Length(handle).value();
    const int64_t count = step.step.counts[row];
    kv_lens[row] = static_cast<int32_t>(length);
    cu_q_lens[row + 1] = static_cast<int32_t>(cu_q_lens[row] + count);
    for (int64_t group = 0; group < groups; ++group) {
      const Ints pages = pool.PagesOf(handle, group).value();
      const size_t at =
          (group * sizes.max_num_seqs + row) * sizes.pages_per_seq;
      for (size_t i = 0; i < pages.size(); ++i) {
        table[at + i] = std::max(pages[i], 0);
      }
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = length - count + i;
        positions[cu_q_lens[row] + i] = static_cast<int32_t>(position);
        slots[group * sizes.max_num_tokens + cu_q_lens[row] + i] =
            static_cast<int32_t>(pages[position / page_size] * page_size +
                                 position % page_size);
      }
    }
  }
  const size_t rows = step.step.handles.size();
  std::fill(cu_q_lens.begin() + static_cast<std::ptrdiff_t>(rows) + 1,
            cu_q_lens.end(), cu_q_lens[rows]);
  ASSERT_EQ(Values(step, Field::kKvLens), kv_lens);
  ASSERT_EQ(Values(step, Field::kCuQLens), cu_q_lens);
  ASSERT_EQ(Values(step, Field::kPositions), positions);
  ASSERT_EQ(Values(step, Field::kSlotMapping), slots);
  ASSERT_EQ(Values(step, Field::kPageIndices), table);
}

// Whatever a buffer held before, a step in it is as if written from scratch.
TEST(PlannerTest, EveryStepIsAsRebuiltAndValid) {
  std::mt19937 random(5);
  for (int run = 0; run < 60; ++run) {
    const PlanSizes sizes{30, 6, 12};
    std::vector<int64_t> windows = {0};
    if (run % 3 == 1) windows = {0, 7};
    Fixture f = Make(90, 1 + run % 7,
                     {.sizes = sizes,
                      .ring = 1 + run % 3,
                      .keep_rows = run % 2 == 0,
                      .track_delta = run % 4 == 0},
                     windows);
    Ints mirror(sizes.max_num_seqs * sizes.pages_per_seq);
    std::vector<SequenceHandle> live, chosen;
    std::vector<int32_t> counts;
    int planned = 0;
    for (int i = 0; i < 80; ++i) {
      while (live.size() < 6) live.push_back(f.Open());
      if (random() % 4 == 0) {
        ASSERT_TRUE(f.pool->Close(live.back()).ok());
        live.pop_back();
        const Result<SequenceHandle> fork = f.pool->Fork(live[0]);
        if (fork.ok()) live.push_back(fork.value());
        f.pool->TakePageCopies();
        chosen.clear();
      }
      if (random() % 8 == 0) {
        const int64_t length = f.pool->Length(live[0]).value();
        (void)f.pool->Truncate(live[0], length - std::min<int64_t>(length, 2));
        f.pool->TakePageCopies();
      }
      if (chosen.empty() || random() % 3 == 0) {  // else: decode once more
        std::shuffle(live.begin(), live.end(), random);
        chosen.assign(live.begin(), live.begin() + random() % live.size());
        counts.clear();
        const int32_t most = random() % 2 == 0 ? 1 : 5;
        for (size_t j = 0; j < chosen.size(); ++j) {
          counts.push_back(1 + static_cast<int32_t>(random() % most));
        }
      } else {
        std::fill(counts.begin(), counts.end(), 1);
      }
      const Result<Planned> result = f.planner->Step(chosen, counts);
      if (!result.ok()) {
        ASSERT_TRUE(f.pool->Close(live.back()).ok());
        live.pop_back();
        chosen.clear();
        continue;
      }
      ++planned;
      const StepBuffer& step = f.planner->buffer(result.value().buffer);
      ExpectAsRebuilt(f, step, sizes);
      if (testing::Test::HasFatalFailure()) FAIL() << "run " << run;
      if (windows.size() == 1) {
        const auto found = Validate(step.View(0, 6, 30), Level::kFull);
        ASSERT_TRUE(found.empty()) << FormatViolations(found);
      }
      const TableDelta& delta = f.planner->delta();
      for (size_t j = 0; j < delta.indices.size(); ++j) {
        mirror[delta.indices[j]] = delta.pages[j];
      }
      for (int64_t row = 0; run % 4 == 0 && row < step.num_seqs(); ++row) {
        const int64_t at = row * sizes.pages_per_seq;
        const int64_t size = static_cast<int64_t>(
            f.pool->PagesOf(step.step.handles[row], 0).value().size());
        ASSERT_TRUE(std::equal(mirror.begin() + at, mirror.begin() + at + size,
                               step.field(Field::kPageIndices) + at));
      }
      if (random() % 5 == 0) {
        ASSERT_TRUE(f.planner->Abort(result.value().buffer).ok());
      } else {
        ASSERT_TRUE(f.planner->Commit(result.value().buffer, {}).ok());
      }
      ASSERT_TRUE(f.planner->Retire(result.value().buffer).ok());
      ASSERT_TRUE(f.pool->Audit().ok());
    }
    EXPECT_GT(planned, 25);
  }
}

TEST(PlannerTest, ThreadsWithPlannersOfTheirOwnShareAPool) {
  const std::shared_ptr<PagePool> pool =
      PagePool::Create({.total_num_pages = 400, .page_size = 4}).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([pool, t] {
      Fixture f{pool, Planner::Create(pool, {.sizes = {32, 8, 16}}).value()};
      std::vector<SequenceHandle> live;
      std::mt19937 random(t);
      for (int i = 0; i < 300; ++i) {
        while (live.size() < 8) live.push_back(f.Open());
        const std::vector<int32_t> counts(live.size(),
                                          i % 3 == 0 ? 1 + t % 3 : 1);
        const Result<Planned> step = f.planner->Step(live, counts);
        if (step.ok()) {
          const int32_t buffer = step.value().buffer;
          const auto found =
              Validate(f.planner->buffer(buffer).View(0, 8, 32), Level::kFull);
          EXPECT_TRUE(found.empty()) << FormatViolations(found);
          EXPECT_TRUE(f.planner->Commit(buffer, {}).ok());
          EXPECT_TRUE(f.planner->Retire(buffer).ok());
        }
        if (!step.ok() || random() % 8 == 0) {
          for (const SequenceHandle handle : live) {
            EXPECT_TRUE(pool->Close(handle).ok());
          }
          live.clear();
        }
      }
      for (const SequenceHandle handle : live) {
        EXPECT_TRUE(pool->Close(handle).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->num_free_pages(), 400);
  EXPECT_TRUE(pool->Audit().ok());
}

}  // namespace
}  // namespace pagemill
