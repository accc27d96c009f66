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

// All of these are for batches that validate() found nothing wrong with.

Output Flat(const HostBatch& batch) {
  Int32Array table(batch.View().max_num_seqs * batch.View().pages_per_seq);
  WithoutGil([&] { WriteFlat(batch.View(), Span(table)); });
  return Give(std::move(table));
}

std::tuple<Output, Output> Ragged(const HostBatch& batch, int64_t capacity) {
  Int32Array sums(batch.View().max_num_seqs + 1), pages(capacity);
  RaiseIfError(WithoutGil(
      [&] { return WriteRagged(batch.View(), Span(sums), Span(pages)); }));
  return {Give(std::move(sums)), Give(std::move(pages))};
}

std::tuple<Output, Output, Output> Indptr(const HostBatch& batch,
                                          int64_t capacity) {
  const int64_t rows = batch.View().max_num_seqs;
  Int32Array indptr(rows + 1), last(rows), pages(capacity);
  RaiseIfError(WithoutGil([&] {
    return WriteIndptr(batch.View(), Span(indptr), Span(last), Span(pages));
  }));
  return {Give(std::move(indptr)), Give(std::move(last)),
          Give(std::move(pages))};
}

Output SlotMapping(const HostBatch& batch) {
  Int32Array slots(batch.View().max_num_tokens);
  WithoutGil([&] { WriteSlotMapping(batch.View(), Span(slots)); });
  return Give(std::move(slots));
}

// The items, [capacity, 6], and how many are no padding; as many as there are
// where no capacity is given.
std::tuple<Int32Output<2>, int64_t> WorkList(const HostBatch& batch,
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
  RaiseIfError(CheckWorkOptions(batch.View(), options));
  const int64_t count = CountWork(batch.View(), options);
  const int64_t rows = capacity.value_or(count);
  if (rows < count) {
    Raise(InvalidArgument(
        StrCat("capacity=", rows, " must be at least ", count,
               ", the batch's work items. Raise capacity, q_block or "
               "max_kv_per_item.")));
  }
  Int32Array items(rows * kWorkItemSize);
  WithoutGil([&] { WriteWork(batch.View(), options, Span(items)); });
  return {TakeOver<2>(std::move(items), {static_cast<size_t>(rows),
                                         static_cast<size_t>(kWorkItemSize)}),
          count};
}

}  // namespace

void BindLayouts(nb::class_<HostBatch> batch) {
  batch
      .def("count_pages",
           [](const HostBatch& batch) { return CountPages(batch.View()); })
      .def("flat", &Flat)
      .def("ragged", &Ragged, "capacity"_a)
      .def("indptr", &Indptr, "capacity"_a)
      .def("slot_mapping", &SlotMapping)
      .def("work_list", &WorkList, nb::kw_only(), "q_block"_a, "kv_block"_a,
           "causal"_a, "sliding_window"_a, "max_kv_per_item"_a,
           "capacity"_a.none());
}

}  // namespace pagemill::bindings
