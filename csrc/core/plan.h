// Planner: writes every metadata array of a step.
//
// Rows that bring one token come first, otherwise the requests' order is kept.
// A plan costs O(its arrays + pages taken).
#ifndef PAGEMILL_CSRC_CORE_PLAN_H_
#define PAGEMILL_CSRC_CORE_PLAN_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "csrc/core/batch_view.h"
#include "csrc/core/page_pool.h"
#include "csrc/core/status.h"

namespace pagemill {

// int32 memory on a cache line's border, which JAX can take without a copy.
class Int32Array {
 public:
  explicit Int32Array(int64_t size = 0);

  int32_t* data() { return data_.get(); }
  const int32_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  int32_t& operator[](int64_t i) { return data_[i]; }
  int32_t operator[](int64_t i) const { return data_[i]; }

 private:
  struct Free {
    void operator()(int32_t* p) const { std::free(p); }
  };
  std::unique_ptr<int32_t[], Free> data_;
  int64_t size_;
};

struct PlanSizes {
  int64_t max_num_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t pages_per_seq = 0;
};

// One step's arrays.  Dead rows and slots: lengths and pages 0, cu_q_lens the
// total, slot_mapping -1.
struct Plan {
  Int32Array kv_lens;       // [max_num_seqs]
  Int32Array page_indices;  // [max_num_seqs, pages_per_seq]
  Int32Array cu_q_lens;     // [max_num_seqs + 1]
  Int32Array num_seqs;      // [1]
  Int32Array distribution;  // [3]
  Int32Array slot_mapping;  // [max_num_tokens]
  Int32Array order;         // [requests]: row r holds request order[r]
  PlanSizes sizes;

  BatchView View(const PagePool& pool) const;
};

class Planner {
 public:
  static Result<Planner> Create(std::shared_ptr<PagePool> pool,
                                PlanSizes sizes);

  // Appends counts[i] tokens to handles[i] and writes the step; all or nothing.
  // Errors as of PagePool::Append; kInvalidArgument also for a count below 1
  // and for more sequences or tokens than the sizes allow.
  Result<Plan> PlanStep(std::span<const SequenceHandle> handles,
                        std::span<const int64_t> counts);

  const PlanSizes& sizes() const { return sizes_; }

 private:
  Planner(std::shared_ptr<PagePool> pool, PlanSizes sizes)
      : pool_(std::move(pool)), sizes_(sizes) {}

  Status CheckCounts(std::span<const int64_t> counts) const;

  std::shared_ptr<PagePool> pool_;
  PlanSizes sizes_;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_H_
