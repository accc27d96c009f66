// A batch's arrays on the host, as Python hands them in.
#ifndef PAGEMILL_CSRC_BINDINGS_HOST_BATCH_H_
#define PAGEMILL_CSRC_BINDINGS_HOST_BATCH_H_

#include <nanobind/stl/optional.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/status.h"
#include "csrc/core/batch_view.h"
#include "csrc/core/str_cat.h"

namespace pagemill::bindings {

using OptionalVector = std::optional<Input<int32_t, 1>>;

// A view of the arrays, which must outlive it.  Raises where their shapes do
// not fit together; their values are for Validate.
inline BatchView MakeView(const Input<int32_t, 1>& kv_lens,
                          const Input<int32_t, 2>& page_indices,
                          const Input<int32_t, 1>& cu_q_lens, int64_t num_seqs,
                          const OptionalVector& distribution,
                          const OptionalVector& slot_mapping, int64_t page_size,
                          int64_t total_num_pages, int64_t max_num_tokens) {
  const size_t rows = page_indices.shape(0);
  if (kv_lens.shape(0) != rows || cu_q_lens.shape(0) != rows + 1 ||
      (distribution && distribution->shape(0) != 3) ||
      (slot_mapping &&
       static_cast<int64_t>(slot_mapping->shape(0)) != max_num_tokens)) {
    Raise(InvalidArgument(
        StrCat("kv_lens, cu_q_lens, distribution and slot_mapping must have ",
               rows, ", ", rows + 1, ", 3 and ", max_num_tokens,
               " entries for page_indices of ", rows, " rows.")));
  }
  return {.kv_lens = kv_lens.data(),
          .page_indices = page_indices.data(),
          .cu_q_lens = cu_q_lens.data(),
          .distribution = distribution ? distribution->data() : nullptr,
          .slot_mapping = slot_mapping ? slot_mapping->data() : nullptr,
          .num_seqs = num_seqs,
          .max_num_seqs = static_cast<int64_t>(rows),
          .pages_per_seq = static_cast<int64_t>(page_indices.shape(1)),
          .page_size = page_size,
          .total_num_pages = total_num_pages,
          .max_num_tokens = max_num_tokens};
}

// A batch's arrays, looked at once and validated as often as wanted.  Kept as
// Python's own: nanobind's handles are not given up while the interpreter ends.
struct HostBatch {
  std::array<nanobind::object, 6> arrays;
  const int32_t* num_seqs;
  BatchView sizes;  // and where the arrays lie

  BatchView View() const {
    BatchView view = sizes;
    view.num_seqs = *num_seqs;
    return view;
  }
};

inline HostBatch MakeHostBatch(
    const nanobind::object& kv_lens, const nanobind::object& page_indices,
    const nanobind::object& cu_q_lens, const nanobind::object& num_seqs,
    const nanobind::object& distribution, const nanobind::object& slot_mapping,
    int64_t page_size, int64_t total_num_pages, int64_t max_num_tokens) {
  using Vector = Input<int32_t, 1>;
  const auto count = nanobind::cast<Vector>(num_seqs);
  if (count.shape(0) != 1) {
    Raise(InvalidArgument("num_seqs must have 1 entry."));
  }
  const BatchView sizes =
      MakeView(nanobind::cast<Vector>(kv_lens),
               nanobind::cast<Input<int32_t, 2>>(page_indices),
               nanobind::cast<Vector>(cu_q_lens), 0,
               nanobind::cast<OptionalVector>(distribution),
               nanobind::cast<OptionalVector>(slot_mapping), page_size,
               total_num_pages, max_num_tokens);
  return {
      {kv_lens, page_indices, cu_q_lens, num_seqs, distribution, slot_mapping},
      count.data(),
      sizes};
}

}  // namespace pagemill::bindings

#endif  // PAGEMILL_CSRC_BINDINGS_HOST_BATCH_H_
