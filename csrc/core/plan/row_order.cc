#include "csrc/core/plan/row_order.h"

#include <algorithm>

namespace pagemill {

int32_t RowOrder::PreviousRow(SequenceHandle handle) const {
  const uint32_t slot = SlotOf(handle);
  if (slot >= row_of_slot_.size()) return -1;
  const int32_t row = row_of_slot_[slot];
  const bool same = row >= 0 && row < static_cast<int32_t>(rows_.size()) &&
                    rows_[row] == handle;
  return same ? row : -1;
}

void RowOrder::Assign(std::span<const SequenceHandle> handles,
                      std::span<const int32_t> counts, bool ones) {
  // The common case: the same sequences decode once more.
  repeated_ = ones && accepted_ && decodes_only_ &&
              std::equal(handles.begin(), handles.end(), requests_.begin(),
                         requests_.end());
  if (repeated_) return;
  accepted_ = false;
  ++version_;
  const int32_t n = static_cast<int32_t>(handles.size());
  std::array<int32_t, kKinds> sizes{};
  for (int32_t count : counts) ++sizes[KindOf(count)];
  ends_ = {sizes[0], sizes[0] + sizes[1], n};

  order_.assign(n, -1);
  for (auto& waiting : waiting_) waiting.clear();
  for (int32_t i = 0; i < n; ++i) {
    const size_t kind = KindOf(counts[i]);
    const int32_t row = keep_rows_ ? PreviousRow(handles[i]) : -1;
    const int32_t begin = kind == 0 ? 0 : ends_[kind - 1];
    if (row >= begin && row < ends_[kind] && order_[row] == -1) {
      order_[row] = i;
    } else {
      waiting_[kind].push_back(i);
    }
  }
  for (size_t kind = 0; kind < kKinds; ++kind) {
    int32_t row = kind == 0 ? 0 : ends_[kind - 1];
    for (int32_t i : waiting_[kind]) {
      while (order_[row] != -1) ++row;
      order_[row] = i;
    }
  }
}

void RowOrder::Accept(std::span<const SequenceHandle> handles) {
  if (repeated_) return;
  accepted_ = true;
  decodes_only_ = ends_[0] == static_cast<int32_t>(handles.size());
  requests_.assign(handles.begin(), handles.end());
  rows_.resize(handles.size());
  for (size_t row = 0; row < rows_.size(); ++row) {
    rows_[row] = handles[order_[row]];
    const uint32_t slot = SlotOf(rows_[row]);
    if (slot >= row_of_slot_.size()) row_of_slot_.resize(slot + 1, -1);
    row_of_slot_[slot] = static_cast<int32_t>(row);
  }
}

}  // namespace pagemill
