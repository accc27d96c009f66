// Planner: writes every metadata array of a step.
//
// A ring of buffers holds the arrays.  A planned step leases one of them until
// it is closed (committed or aborted) and retired; then the next step that
// takes the buffer writes into it only what differs, so that a step costs
// O(its sequences, tokens and new pages).
#ifndef PAGEMILL_CSRC_CORE_PLAN_PLANNER_H_
#define PAGEMILL_CSRC_CORE_PLAN_PLANNER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "csrc/core/plan/row_order.h"
#include "csrc/core/plan/step_buffer.h"
#include "csrc/core/pool/page_pool.h"
#include "csrc/core/status.h"

namespace pagemill {

struct PlannerOptions {
  PlanSizes sizes = {};
  int64_t ring = 3;
  // Capacities to choose from, ascending; the last is the size's.  Empty: only
  // the size's.
  std::vector<int64_t> token_buckets = {}, seq_buckets = {};
  int64_t prefill_chunk = 0;
  bool keep_rows = false;
  bool track_delta = false;
};

// A step's place: which buffer holds it, and its capacities.
struct Planned {
  int32_t buffer = 0;
  int32_t seq_bucket = 0;
  int32_t token_bucket = 0;
  int64_t num_tokens = 0;
};

// Entries of the first group's flat page table that changed, for a copy of it
// elsewhere: table[indices[i]] = pages[i].
struct TableDelta {
  std::vector<int32_t> indices;
  std::vector<int32_t> pages;
};

class Planner {
 public:
  static Result<std::unique_ptr<Planner>> Create(std::shared_ptr<PagePool> pool,
                                                 PlannerOptions options);

  // Appends counts[i] tokens to handles[i] and writes the step; all or nothing.
  // Errors as of PagePool::BeginStep; kInvalidArgument also for a count below 1
  // and for more sequences or tokens than the sizes allow; kUnavailable when
  // every buffer is leased or another thread is planning.
  Result<Planned> Step(std::span<const SequenceHandle> handles,
                       std::span<const int32_t> counts);

  // Whether Step would succeed now: its errors, and nothing is changed.
  Status Check(std::span<const SequenceHandle> handles,
               std::span<const int32_t> counts);

  Status Commit(int64_t buffer, std::span<const int32_t> accepted);
  Status Abort(int64_t buffer);
  Status Retire(int64_t buffer);
  // Neither open nor in flight.
  bool IsFree(int64_t buffer) const {
    return !buffers_[buffer]->step.open && !buffers_[buffer]->step.in_flight;
  }

  const StepBuffer& buffer(int64_t index) const { return *buffers_[index]; }
  StepBuffer& buffer(int64_t index) { return *buffers_[index]; }
  const PlannerOptions& options() const { return options_; }
  const PagePool& pool() const { return *pool_; }

  // What changed in the last step that succeeded, with track_delta.
  const TableDelta& delta() const { return delta_; }

 private:
  Planner(std::shared_ptr<PagePool> pool, PlannerOptions options);

  Status CheckCounts(std::span<const int32_t> counts, int64_t total,
                     int32_t least) const;
  // The buffer for a step that the sizes allow, and where it is.
  Result<StepBuffer*> Prepare(std::span<const SequenceHandle> handles,
                              std::span<const int32_t> counts,
                              Planned& planned);
  StepBuffer* FindFree(int32_t* index);
  void SetRows(std::span<const SequenceHandle> handles,
               std::span<const int32_t> counts, StepBuffer& buffer);
  Status PlaceRows(StepBuffer& buffer);
  bool RepeatDecodes(StepBuffer& buffer);
  void AddDelta(size_t row, const PagePool::Placed& seq);

  const std::shared_ptr<PagePool> pool_;
  const PlannerOptions options_;
  std::mutex mutex_;
  RowOrder order_;
  std::vector<std::unique_ptr<StepBuffer>> buffers_;
  // How the last step left its rows' sequences.
  std::vector<int64_t> layouts_;
  std::vector<int32_t> lengths_;
  std::vector<RowState> mirror_;
  TableDelta delta_, next_delta_;  // the next is of a step that may fail
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_PLANNER_H_
