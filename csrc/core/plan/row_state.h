// RowState: what a row of a page table holds, to write only what changed.
#ifndef PAGEMILL_CSRC_CORE_PLAN_ROW_STATE_H_
#define PAGEMILL_CSRC_CORE_PLAN_ROW_STATE_H_

#include <cstdint>

#include "csrc/core/pool/page_pool.h"

namespace pagemill {

class RowState {
 public:
  // The row holds just that sequence's `slots` pages already.
  bool Holds(const PagePool::Placed& seq, int32_t slots) const {
    return layout_ == seq.sequence.layout && slots_ == slots &&
           trimmed_ == seq.sequence.trimmed;
  }

  // So many of its slots hold the sequence's pages, unless it shrank.
  int32_t SlotsHeld(const PagePool::Placed& seq) const {
    return layout_ == seq.sequence.layout ? slots_ : 0;
  }

  // Brings the row to the sequence's `slots` pages: calls write(from, to) for
  // the slots to write, clear(from, to) for those to make dead, and trim(from,
  // to) where the sequence's windows have moved between the two lengths.
  template <typename Write, typename Clear, typename Trim>
  void Sync(const PagePool::Placed& seq, int32_t slots, Write&& write,
            Clear&& clear, Trim&& trim) {
    const Sequence& now = seq.sequence;
    const bool same = layout_ == now.layout;
    const int32_t from = SlotsHeld(seq);
    if (from < slots) write(from, slots);
    if (slots < slots_) clear(slots, slots_);
    if (same && trimmed_ < now.trimmed) trim(trimmed_, now.trimmed);
    layout_ = now.layout;
    slots_ = slots;
    trimmed_ = now.trimmed;
  }

  // The row is nobody's any more.
  template <typename Clear>
  void Leave(Clear&& clear) {
    if (slots_ > 0) clear(0, slots_);
    *this = RowState();
  }

 private:
  int64_t layout_ = -1;
  int32_t slots_ = 0;
  int32_t trimmed_ = 0;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_ROW_STATE_H_
