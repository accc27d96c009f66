#include "csrc/core/plan.h"

#include <nanobind/stl/shared_ptr.h>

#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/module.h"
#include "csrc/bindings/status.h"
#include "csrc/core/str_cat.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

// A plan as numpy arrays.
struct PlanArrays {
  Int32Output<1> kv_lens;
  Int32Output<2> page_indices;
  Int32Output<1> cu_q_lens;
  Int32Output<1> num_seqs;
  Int32Output<1> distribution;
  Int32Output<1> slot_mapping;
  Int32Output<1> order;
};

Int32Output<1> Vector(Int32Array array) {
  const size_t size = static_cast<size_t>(array.size());
  return TakeOver<1>(std::move(array), {size});
}

PlanArrays HandOver(Plan plan) {
  const size_t rows = static_cast<size_t>(plan.sizes.max_num_seqs);
  const size_t width = static_cast<size_t>(plan.sizes.pages_per_seq);
  return {
      .kv_lens = Vector(std::move(plan.kv_lens)),
      .page_indices = TakeOver<2>(std::move(plan.page_indices), {rows, width}),
      .cu_q_lens = Vector(std::move(plan.cu_q_lens)),
      .num_seqs = Vector(std::move(plan.num_seqs)),
      .distribution = Vector(std::move(plan.distribution)),
      .slot_mapping = Vector(std::move(plan.slot_mapping)),
      .order = Vector(std::move(plan.order))};
}

PlanArrays PlanStep(Planner& planner, const Input<int64_t, 1>& handles,
                    const Input<int64_t, 1>& counts) {
  if (handles.shape(0) != counts.shape(0)) {
    Raise(InvalidArgument(
        StrCat("handles and counts differ in length: ", handles.shape(0),
               " and ", counts.shape(0), ".")));
  }
  Result<Plan> plan = [&] {
    nb::gil_scoped_release release;
    return planner.PlanStep({handles.data(), handles.shape(0)},
                            {counts.data(), counts.shape(0)});
  }();
  return HandOver(ValueOrRaise(std::move(plan)));
}

// The array owns its memory: the property needs no tie to the plan.
template <auto kMember>
void Array(nb::class_<PlanArrays>& plan, const char* name) {
  plan.def_prop_ro(
      name, [](const PlanArrays& arrays) { return arrays.*kMember; },
      nb::rv_policy::automatic);
}

}  // namespace

void BindPlanner(nb::module_& m) {
  auto plan = nb::class_<PlanArrays>(m, "Plan", "One step's arrays.");
  Array<&PlanArrays::kv_lens>(plan, "kv_lens");
  Array<&PlanArrays::page_indices>(plan, "page_indices");
  Array<&PlanArrays::cu_q_lens>(plan, "cu_q_lens");
  Array<&PlanArrays::num_seqs>(plan, "num_seqs");
  Array<&PlanArrays::distribution>(plan, "distribution");
  Array<&PlanArrays::slot_mapping>(plan, "slot_mapping");
  Array<&PlanArrays::order>(plan, "order");
  nb::class_<Planner>(m, "Planner", "Writes the metadata of a step.")
      .def(nb::new_([](std::shared_ptr<PagePool> pool, int64_t max_num_tokens,
                       int64_t max_num_seqs, int64_t pages_per_seq) {
             return ValueOrRaise(Planner::Create(
                 std::move(pool),
                 {max_num_tokens, max_num_seqs, pages_per_seq}));
           }),
           "pool"_a, "max_num_tokens"_a, "max_num_seqs"_a, "pages_per_seq"_a)
      .def("plan", &PlanStep, "handles"_a, "counts"_a);
}

}  // namespace pagemill::bindings
