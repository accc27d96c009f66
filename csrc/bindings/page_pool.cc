#include "csrc/core/page_pool.h"

#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <utility>
#include <vector>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/module.h"
#include "csrc/bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

using Pool = std::shared_ptr<PagePool>;

Int32Output<2> Pairs(const std::vector<PageCopy>& copies) {
  std::vector<int32_t> flat;
  flat.reserve(2 * copies.size());
  for (const PageCopy& copy : copies) {
    flat.push_back(copy.source);
    flat.push_back(copy.target);
  }
  return TakeOver<2>(std::move(flat), {copies.size(), 2});
}

Int32Output<1> Pages(const PagePool& pool, SequenceHandle handle) {
  std::vector<int32_t> pages = ValueOrRaise(pool.Pages(handle));
  const size_t size = pages.size();
  return TakeOver<1>(std::move(pages), {size});
}

}  // namespace

void BindPagePool(nb::module_& m) {
  nb::class_<PagePool>(m, "PagePool", "Reference-counted pages.")
      .def(nb::new_([](int64_t total_num_pages, int64_t page_size) -> Pool {
             return ValueOrRaise(PagePool::Create(total_num_pages, page_size));
           }),
           "total_num_pages"_a, "page_size"_a)
      .def("open", &PagePool::Open)
      .def(
          "close",
          [](PagePool& pool, SequenceHandle handle) {
            RaiseIfError(pool.Close(handle));
          },
          "handle"_a)
      .def(
          "fork",
          [](PagePool& pool, SequenceHandle handle) {
            return ValueOrRaise(pool.Fork(handle));
          },
          "handle"_a)
      .def(
          "truncate",
          [](PagePool& pool, SequenceHandle handle, int64_t length) {
            RaiseIfError(pool.Truncate(handle, length));
          },
          "handle"_a, "length"_a)
      .def(
          "length",
          [](const PagePool& pool, SequenceHandle handle) {
            return ValueOrRaise(pool.Length(handle));
          },
          "handle"_a)
      .def("pages", &Pages, "handle"_a)
      .def(
          "reference_count",
          [](const PagePool& pool, int64_t page) {
            return ValueOrRaise(pool.ReferenceCount(page));
          },
          "page"_a)
      .def("take_page_copies",
           [](PagePool& pool) { return Pairs(pool.TakePageCopies()); })
      .def("audit",
           [](const PagePool& pool) {
             const Status status = [&] {
               nb::gil_scoped_release release;
               return pool.Audit();
             }();
             RaiseIfError(status);
           })
      .def_prop_ro("total_num_pages", &PagePool::total_num_pages)
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("num_free_pages", &PagePool::num_free_pages)
      .def_prop_ro("num_sequences", &PagePool::num_sequences);
}

}  // namespace pagemill::bindings
