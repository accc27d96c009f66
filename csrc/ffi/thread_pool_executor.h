// XLA's thread pool as an Executor.
#ifndef PAGEMILL_CSRC_FFI_THREAD_POOL_EXECUTOR_H_
#define PAGEMILL_CSRC_FFI_THREAD_POOL_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "csrc/core/executor.h"
#include "xla/ffi/api/ffi.h"

namespace pagemill {

class ThreadPoolExecutor : public Executor {
 public:
  explicit ThreadPoolExecutor(xla::ffi::ThreadPool& pool) : pool_(pool) {}

  // One less than the pool has: the caller works as well.
  int64_t num_threads() const override { return pool_.num_threads() - 1; }
  void Schedule(std::function<void()> task) override {
    pool_.Schedule(std::move(task));
  }

 private:
  xla::ffi::ThreadPool& pool_;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_FFI_THREAD_POOL_EXECUTOR_H_
