#include "csrc/core/plan/layouts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/host_batch.h"
#include "csrc/bindings/module.h"
#include "csrc/bindings/status.h"
#include "csrc/core/plan/int32_array.h"
#include "csrc/core/plan/work_list.h"
#include "csrc/core/str_cat.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

using Vector = Input<int32_t, 1>;
using Output = Int32Output<1>;

std::span<int32_t> Span(Int32Array& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

Output Give(Int32Array array) {
  const size_t size = static_cast<size_t>(array.size());
  return TakeOver<1>(std::move(array), {size});
}

template <typename Call>
auto WithoutGil(Call call) {
  nb::gil_scoped_release release;
  return call();
}

// A batch whose values were proved, with the arrays it lies in.
struct ProvedBatch {
  Vector kv_lens;
  Input<int32_t, 2> page_indices;
  Vector cu_q_lens;
  BatchView view;
};

Output Flat(const ProvedBatch& batch) {
  Int32Array table(batch.view.max_num_seqs * batch.view.pages_per_seq);
  WithoutGil([&] { WriteFlat(batch.view, Span(table)); });
  return Give(std::move(table));
}

std::tuple<Output, Output> Ragged(const ProvedBatch& batch, int64_t capacity) {
  Int32Array sums(batch.view.max_num_seqs + 1), pages(capacity);
  RaiseIfError(WithoutGil(
      [&] { return WriteRagged(batch.view, Span(sums), Span(pages)); }));
  return {Give(std::move(sums)), Give(std::move(pages))};
}

std::tuple<Output, Output, Output> Indptr(const ProvedBatch& batch,
                                          int64_t capacity) {
  const int64_t rows = batch.view.max_num_seqs;
  Int32Array indptr(rows + 1), last(rows), pages(capacity);
  RaiseIfError(WithoutGil([&] {
    return WriteIndptr(batch.view, Span(indptr), Span(last), Span(pages));
  }));
  return {Give(std::move(indptr)), Give(std::move(last)),
          Give(std::move(pages))};
}

Output SlotMapping(const ProvedBatch& batch) {
  Int32Array slots(batch.view.max_num_tokens);
  WithoutGil([&] { WriteSlotMapping(batch.view, Span(slots)); });
  return Give(std::move(slots));
}

// The items, [capacity, 6], and how many are no padding; as many as there are
// where no capacity is given.
std::tuple<Int32Output<2>, int64_t> WorkList(const ProvedBatch& batch,
                                             int64_t q_block, int64_t kv_block,
                                             bool causal,
                                             int64_t sliding_window,
                                             int64_t max_kv_per_item,
                                             std::optional<int64_t> capacity) {
  const WorkOptions options{.q_block = q_block,
                            .kv_block = kv_block,
                            .causal = causal,
                            .sliding_window = sliding_window,
                            .max_kv_per_item = max_kv_per_item};
  RaiseIfError(CheckWorkOptions(batch.view, options));
  const int64_t count = CountWork(batch.view, options);
  const int64_t rows = capacity.value_or(count);
  if (rows < count) {
    Raise(InvalidArgument(
        StrCat("capacity=", rows, " must be at least ", count,
               ", the batch's work items. Raise capacity, q_block or "
               "max_kv_per_item.")));
  }
  Int32Array items(rows * kWorkItemSize);
  WithoutGil([&] { WriteWork(batch.view, options, Span(items)); });
  return {TakeOver<2>(std::move(items), {static_cast<size_t>(rows),
                                         static_cast<size_t>(kWorkItemSize)}),
          count};
}

}  // namespace

void BindLayouts(nb::module_& m) {
  nb::class_<ProvedBatch>(m, "ProvedBatch",
                          "A batch that validate() found nothing wrong with.")
      .def(nb::new_([](Vector kv_lens, Input<int32_t, 2> page_indices,
                       Vector cu_q_lens, int64_t num_seqs, int64_t page_size,
                       int64_t total_num_pages, int64_t max_num_tokens) {
             const BatchView view =
                 MakeView(kv_lens, page_indices, cu_q_lens, num_seqs, {}, {},
                          page_size, total_num_pages, max_num_tokens);
             return ProvedBatch{std::move(kv_lens), std::move(page_indices),
                                std::move(cu_q_lens), view};
           }),
           "kv_lens"_a, "page_indices"_a, "cu_q_lens"_a, "num_seqs"_a,
           nb::kw_only(), "page_size"_a, "total_num_pages"_a,
           "max_num_tokens"_a)
      .def("count_pages",
           [](const ProvedBatch& batch) { return CountPages(batch.view); })
      .def("flat", &Flat)
      .def("ragged", &Ragged, "capacity"_a)
      .def("indptr", &Indptr, "capacity"_a)
      .def("slot_mapping", &SlotMapping)
      .def("work_list", &WorkList, nb::kw_only(), "q_block"_a, "kv_block"_a,
           "causal"_a, "sliding_window"_a, "max_kv_per_item"_a,
           "capacity"_a.none());
}

}  // namespace pagemill::bindings
