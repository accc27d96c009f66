#include "csrc/core/plan/layouts.h"

#include <nanobind/stl/tuple.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <utility>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/host_batch.h"
#include "csrc/bindings/module.h"
#include "csrc/bindings/status.h"
#include "csrc/core/plan/int32_array.h"

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

// A batch whose values were proved, with the arrays it lies in.
struct ProvedBatch {
  Vector kv_lens;
  Input<int32_t, 2> page_indices;
  Vector cu_q_lens;
  BatchView view;
};

Output Flat(const ProvedBatch& batch) {
  Int32Array table(batch.view.max_num_seqs * batch.view.pages_per_seq);
  WriteFlat(batch.view, Span(table));
  return Give(std::move(table));
}

std::tuple<Output, Output> Ragged(const ProvedBatch& batch, int64_t capacity) {
  Int32Array sums(batch.view.max_num_seqs + 1), pages(capacity);
  RaiseIfError(WriteRagged(batch.view, Span(sums), Span(pages)));
  return {Give(std::move(sums)), Give(std::move(pages))};
}

std::tuple<Output, Output, Output> Indptr(const ProvedBatch& batch,
                                          int64_t capacity) {
  const int64_t rows = batch.view.max_num_seqs;
  Int32Array indptr(rows + 1), last(rows), pages(capacity);
  RaiseIfError(WriteIndptr(batch.view, Span(indptr), Span(last), Span(pages)));
  return {Give(std::move(indptr)), Give(std::move(last)),
          Give(std::move(pages))};
}

Output SlotMapping(const ProvedBatch& batch) {
  Int32Array slots(batch.view.max_num_tokens);
  WriteSlotMapping(batch.view, Span(slots));
  return Give(std::move(slots));
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
      .def("slot_mapping", &SlotMapping);
}

}  // namespace pagemill::bindings
