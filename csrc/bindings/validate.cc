#include "csrc/core/validate.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cctype>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/host_batch.h"
#include "csrc/bindings/module.h"
#include "csrc/core/str_cat.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

// kCuQLensStart -> CU_Q_LENS_START.
std::string PythonName(std::string_view name) {
  std::string out;
  for (const char c : name.substr(1)) {
    if (std::isupper(c) && !out.empty()) out += '_';
    out += static_cast<char>(std::toupper(c));
  }
  return out;
}

std::optional<int64_t> NoneIfNegative(int64_t value) {
  return value < 0 ? std::nullopt : std::optional<int64_t>(value);
}

// What Validate found, as a sequence whose items Python makes on demand.
struct Violations {
  std::vector<Violation> found;
};

// Smaller batches are proved before another thread could take the lock.
constexpr int64_t kReleaseGilAtPages = 4096;

std::optional<Violations> ValidateBatch(const HostBatch& batch, int level,
                                        int64_t sliding_window,
                                        int64_t smem_budget_bytes) {
  BatchView view = batch.View();
  view.sliding_window = sliding_window;
  view.smem_budget_bytes = smem_budget_bytes;
  std::optional<nb::gil_scoped_release> release;
  if (view.max_num_seqs * view.pages_per_seq >= kReleaseGilAtPages) {
    release.emplace();
  }
  std::vector<Violation> found = Validate(view, static_cast<Level>(level));
  release.reset();
  if (found.empty()) return std::nullopt;
  return Violations{std::move(found)};
}

void BindTypes(nb::module_& m) {
  auto code = nb::enum_<CheckCode>(m, "CheckCode", nb::is_arithmetic(),
                                   "What a violation is about.");
  for (const CheckInfo& info : AllChecks()) {
    code.value(PythonName(info.name).c_str(), info.code,
               std::string(info.rule).c_str());
  }
  nb::enum_<Level>(m, "Level", nb::is_arithmetic(), "How much is checked.")
      .value("STRUCTURE", Level::kStructure,
             "Lengths, order, ranges and capacities.")
      .value("FULL", Level::kFull,
             "Also page ownership, and decode and prefill rows.");
  nb::class_<Violation>(m, "Violation", "One broken rule of a batch's values.")
      .def_ro("code", &Violation::code)
      .def_prop_ro(
          "sequence",
          [](const Violation& v) { return NoneIfNegative(v.sequence); })
      .def_prop_ro("index",
                   [](const Violation& v) { return NoneIfNegative(v.index); })
      .def_ro("value", &Violation::value)
      .def_ro("limit", &Violation::limit)
      .def_prop_ro("message", &Violation::message)
      .def_prop_ro("remedy", &Violation::remedy)
      .def(
          "__eq__",
          [](const Violation& v, const nb::object& other) {
            const Violation* violation = nullptr;
            return nb::try_cast(other, violation) && *violation == v;
          },
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__",
           [](const Violation& v) {
             return nb::hash(nb::make_tuple(static_cast<int>(v.code),
                                            v.sequence, v.index, v.value));
           })
      .def("__getstate__",
           [](const Violation& v) {
             return std::make_tuple(v.code, v.sequence, v.index, v.value,
                                    v.limit, v.detail[0], v.detail[1]);
           })
      .def("__setstate__",
           [](Violation& v, std::tuple<CheckCode, int64_t, int64_t, int64_t,
                                       int64_t, int64_t, int64_t>
                                state) {
             const auto [code, sequence, index, value, limit, d0, d1] = state;
             new (&v) Violation{code, sequence, index, value, limit, {d0, d1}};
           })
      .def("__repr__", [](const Violation& v) {
        return StrCat("Violation(", v.message(), ")");
      });
}

void BindViolations(nb::module_& m) {
  nb::class_<Violations>(m, "Violations", "What a batch breaks, in order.")
      .def("__len__", [](const Violations& v) { return v.found.size(); })
      .def("__getitem__", [](const Violations& v, int64_t i) {
        if (i < 0 || i >= static_cast<int64_t>(v.found.size())) {
          throw nb::index_error();
        }
        return v.found[i];
      });
}

}  // namespace

nb::class_<HostBatch> BindValidate(nb::module_& m) {
  BindTypes(m);
  BindViolations(m);
  m.def(
      "checks",
      [] {
        std::vector<
            std::tuple<CheckCode, Level, std::string_view, std::string_view>>
            checks;
        for (const CheckInfo& info : AllChecks()) {
          checks.emplace_back(info.code, info.level, info.rule, info.remedy);
        }
        return checks;
      },
      "Every check: (code, level, what must hold, what to do otherwise).");
  auto batch =
      nb::class_<HostBatch>(m, "HostBatch", "A batch's arrays on the host.");
  batch
      .def(nb::new_(&MakeHostBatch), "kv_lens"_a, "page_indices"_a,
           "cu_q_lens"_a, "num_seqs"_a, "distribution"_a.none(),
           "slot_mapping"_a.none(), "page_size"_a, "total_num_pages"_a,
           "max_num_tokens"_a)
      .def("validate", &ValidateBatch, "level"_a, "sliding_window"_a,
           "smem_budget_bytes"_a,
           "All violations of the values now; None when they are valid.");
  m.def(
      "format_violations",
      [](const Violations& violations) {
        return FormatViolations(violations.found);
      },
      "violations"_a, "The text that errors show.");
  m.def(
      "format_violations",
      [](const std::vector<Violation>& violations) {
        return FormatViolations(violations);
      },
      "violations"_a);
  return batch;
}

}  // namespace pagemill::bindings
