#include "csrc/core/executor.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "csrc/core/thread_executor.h"
#include "gtest/gtest.h"

namespace pagemill {
namespace {

// Keeps tasks until it is told to run them.
class LateExecutor final : public Executor {
 public:
  int64_t num_threads() const override { return 8; }
  void Schedule(std::function<void()> task) override {
    tasks.push_back(std::move(task));
  }
  std::vector<std::function<void()>> tasks;
};

TEST(ParallelForTest, RunsEachItemOnce) {
  for (int64_t threads : {0, 1, 3, 8}) {
    ThreadExecutor executor(threads);
    for (int64_t count : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> runs(count);
      ParallelFor(executor, count, 8, [&](int64_t item) { ++runs[item]; });
      for (const auto& n : runs) EXPECT_EQ(n, 1);
    }
  }
}

TEST(ParallelForTest, ResultsAreVisibleToTheCaller) {
  ThreadExecutor executor(3);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<int64_t> squares(50);
    ParallelFor(executor, 50, 3,
                [&](int64_t item) { squares[item] = item * item; });
    for (int64_t i = 0; i < 50; ++i) ASSERT_EQ(squares[i], i * i);
  }
}

TEST(ParallelForTest, FinishesWithoutItsHelpersAndBearsThemLate) {
  LateExecutor executor;
  {
    std::vector<int> runs(20);
    ParallelFor(executor, 20, 3, [&](int64_t item) { ++runs[item]; });
    for (int n : runs) EXPECT_EQ(n, 1);
  }
  ASSERT_EQ(executor.tasks.size(), 3u);
  for (auto& task : executor.tasks)
    task();  // `runs` is gone: must not touch it
}

TEST(ParallelForTest, AsksForNoHelperItCannotUse) {
  LateExecutor executor;
  ParallelFor(executor, 1, 8, [](int64_t) {});
  ParallelFor(executor, 100, 0, [](int64_t) {});
  EXPECT_TRUE(executor.tasks.empty());
  ParallelFor(executor, 3, 8, [](int64_t) {});
  EXPECT_EQ(executor.tasks.size(), 2u);
}

}  // namespace
}  // namespace pagemill
