// StepBuffer: one step's arrays, kept and brought up to date from use to use.
//
// Dead rows and slots: lengths, pages, positions and logits indices 0,
// cu_q_lens the total, slot_mapping -1.
#ifndef PAGEMILL_CSRC_CORE_PLAN_STEP_BUFFER_H_
#define PAGEMILL_CSRC_CORE_PLAN_STEP_BUFFER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/plan/blob_layout.h"
#include "csrc/core/plan/int32_array.h"
#include "csrc/core/plan/row_state.h"
#include "csrc/core/pool/page_pool.h"

namespace pagemill {

class StepBuffer {
 public:
  StepBuffer(const PlanSizes& sizes, const PagePool& pool);

  // Sets what step.counts alone tell; then call WriteRow for each row, or
  // WriteDecodes for all, and Finish.
  void Begin(int32_t decodes);
  void WriteRow(size_t row, const PagePool::Placed& seq);
  // Fetches what WriteRow will copy.
  void PrefetchPages(size_t row, const PagePool::Placed& seq) const;
  // Rows that each got one token: kv_lens is set, and slot_mapping holds the
  // rows' last pages.
  void WriteDecodes();
  void Finish(int32_t prefill_end);

  // Rows of the page table that may differ from their sequences' pages.
  void MarkStale(std::span<const int32_t> rows);
  void MarkAllStale();
  bool all_stale() const { return all_stale_; }
  std::span<const int32_t> stale_rows() const { return stale_rows_; }
  void SyncRow(size_t row, const PagePool::Placed& seq);
  void ClearStale();
  void PrefetchRow(size_t row) {
    const int64_t last = pool_.geometry().FullSlots(step.lengths[row] - 1);
    __builtin_prefetch(table_row(0, row) + last, 1);
    __builtin_prefetch(&states_[row], 1);
  }

  int64_t num_seqs() const { return rows_; }
  int64_t num_tokens() const { return tokens_; }

  const BlobLayout& layout() const { return layout_; }
  const Int32Array& memory() const { return memory_; }
  int32_t* field(Field field) { return memory_.data() + layout_[field].offset; }
  const int32_t* field(Field field) const {
    return memory_.data() + layout_[field].offset;
  }

  // The step as a batch of the given capacities for one KV group.
  BatchView View(int64_t group, int64_t max_num_seqs,
                 int64_t max_num_tokens) const;
  // The arrays alone, of these capacities, in memory of their own.
  Int32Array Copy(int64_t max_num_seqs, int64_t max_num_tokens) const;

  // Row r is for request order[r] of the step.
  std::vector<int32_t> order;
  int64_t order_version = -1;
  PoolStep step;

 private:
  void WriteTokens(int32_t begin, int32_t count, const PagePool::Placed& seq);
  void WriteSlots(size_t row, int32_t from, int32_t to,
                  const PagePool::Placed& seq);
  void ClearSlots(size_t row, int32_t from, int32_t to);
  void TrimSlots(size_t row, int32_t from_length, int32_t to_length);
  int32_t* table_row(int64_t group, size_t row) {
    return field(Field::kPageIndices) +
           (group * sizes_.max_num_seqs + static_cast<int64_t>(row)) *
               sizes_.pages_per_seq;
  }

  const PlanSizes sizes_;
  const PagePool& pool_;
  const int64_t groups_;
  const bool has_windows_;
  const BlobLayout layout_;
  Int32Array memory_;
  std::vector<RowState> states_;
  std::vector<int32_t> stale_rows_;
  bool all_stale_ = true;
  int32_t rows_ = 0, tokens_ = 0;  // of this step
  // Entries from rows_ and tokens_ up to these may be of earlier steps, also of
  // failed ones.
  int32_t dirty_rows_ = 0, dirty_tokens_ = 0;
  bool tail_holds_ = true;  // cu_q_lens past the live rows
  int32_t iota_rows_ = 0;   // decodes: rows that start at the row's number
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_STEP_BUFFER_H_
