#include "csrc/core/executor.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

namespace pagemill {
namespace {

// Outlives the call: late tasks still look at `next`, and nothing else.
struct Shared {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  int64_t count = 0;
  // Valid while done < count, that is, for whoever holds an item.
  const std::function<void(int64_t)>* work = nullptr;
};

void TakeItems(Shared& shared) {
  for (;;) {
    const int64_t item = shared.next.fetch_add(1, std::memory_order_relaxed);
    if (item >= shared.count) return;
    (*shared.work)(item);
    const int64_t done = shared.done.fetch_add(1, std::memory_order_acq_rel);
    if (done + 1 == shared.count) shared.done.notify_all();
  }
}

}  // namespace

void ParallelFor(Executor& executor, int64_t count, int64_t helpers,
                 const std::function<void(int64_t)>& work) {
  helpers = std::min({helpers, executor.num_threads(), count - 1});
  if (helpers <= 0) {
    for (int64_t item = 0; item < count; ++item) work(item);
    return;
  }
  auto shared = std::make_shared<Shared>();
  shared->count = count;
  shared->work = &work;
  for (int64_t i = 0; i < helpers; ++i) {
    executor.Schedule([shared] { TakeItems(*shared); });
  }
  TakeItems(*shared);
  for (int64_t done = shared->done.load(std::memory_order_acquire);
       done != count; done = shared->done.load(std::memory_order_acquire)) {
    shared->done.wait(done, std::memory_order_acquire);
  }
}

}  // namespace pagemill
