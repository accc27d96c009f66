// A few threads of its own as an Executor, for tests and benchmarks.
#ifndef PAGEMILL_CSRC_CORE_THREAD_EXECUTOR_H_
#define PAGEMILL_CSRC_CORE_THREAD_EXECUTOR_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/core/executor.h"

namespace pagemill {

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int64_t num_threads) {
    for (int64_t i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this] { Serve(); });
    }
  }

  // Runs what is still scheduled, late as it is.
  ~ThreadExecutor() override {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const override {
    return static_cast<int64_t>(threads_.size());
  }

  void Schedule(std::function<void()> task) override {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

 private:
  void Serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_THREAD_EXECUTOR_H_
