// Executor: where parallel work may go; ParallelFor: how it is shared out.
#ifndef PAGEMILL_CSRC_CORE_EXECUTOR_H_
#define PAGEMILL_CSRC_CORE_EXECUTOR_H_

#include <cstdint>
#include <functional>

namespace pagemill {

class Executor {
 public:
  virtual ~Executor() = default;
  // Threads that may run scheduled tasks, the caller not counted.
  virtual int64_t num_threads() const = 0;
  // Runs the task some time, on some thread.
  virtual void Schedule(std::function<void()> task) = 0;
};

// Runs nothing elsewhere: ParallelFor works alone on the calling thread.
class InlineExecutor : public Executor {
 public:
  int64_t num_threads() const override { return 0; }
  void Schedule(std::function<void()> task) override { task(); }
};

// Calls work(i) for i in [0, count), in any order, at most `helpers` scheduled
// tasks beside the caller.  Items are taken off one counter, the caller takes
// part, and it waits for items, never for tasks: a task that the executor
// starts late, or never, delays nothing.
void ParallelFor(Executor& executor, int64_t count, int64_t helpers,
                 const std::function<void(int64_t)>& work);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_EXECUTOR_H_
