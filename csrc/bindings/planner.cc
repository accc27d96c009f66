#include "csrc/core/plan/planner.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "csrc/bindings/arrays.h"
#include "csrc/bindings/module.h"
#include "csrc/bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

// Smaller steps are over before another thread could take the lock.
constexpr size_t kReleaseGilAt = 1024;

using Handles = Input<int64_t, 1>;
using Counts = Input<int32_t, 1>;
using ReadOnly = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>;

// buffer + ring * (seq_bucket + seq_buckets * token_bucket).
int64_t Step(Planner& planner, const Handles& handles, const Counts& counts) {
  const std::span<const int64_t> h(handles.data(), handles.shape(0));
  const std::span<const int32_t> c(counts.data(), counts.shape(0));
  std::optional<nb::gil_scoped_release> release;
  if (h.size() >= kReleaseGilAt) release.emplace();
  const Result<Planned> result = planner.Step(h, c);
  release.reset();
  const Planned planned = ValueOrRaise(result);
  const PlannerOptions& options = planner.options();
  const int64_t seq_buckets = static_cast<int64_t>(options.seq_buckets.size());
  return planned.buffer + options.ring * (planned.seq_bucket +
                                          seq_buckets * planned.token_bucket);
}

// What the buffer's arrays lie in; lives as long as the planner.
ReadOnly Memory(nb::handle self, int64_t buffer) {
  const Planner& planner = nb::cast<const Planner&>(self);
  const Int32Array& memory = planner.buffer(buffer).memory();
  return ReadOnly(memory.data(), {static_cast<size_t>(memory.size())}, self);
}

Int32Output<1> Copy(const Planner& planner, int64_t buffer,
                    int64_t max_num_seqs, int64_t max_num_tokens) {
  Int32Array copy = planner.buffer(buffer).Copy(max_num_seqs, max_num_tokens);
  const size_t size = static_cast<size_t>(copy.size());
  return TakeOver<1>(std::move(copy), {size});
}

Int32Output<1> Copied(const std::vector<int32_t>& values) {
  return TakeOver<1>(std::vector<int32_t>(values), {values.size()});
}

// [(name, offset)], in int32s.
nb::typed<nb::list, nb::typed<nb::tuple, nb::str, nb::int_>> Layout(
    const Planner& planner, int64_t max_num_seqs, int64_t max_num_tokens) {
  constexpr const char* kNames[kNumFields] = {
      "num_seqs",       "distribution", "kv_lens",      "cu_q_lens",
      "logits_indices", "positions",    "slot_mapping", "page_indices"};
  const BlobLayout layout(
      {max_num_tokens, max_num_seqs, planner.options().sizes.pages_per_seq},
      planner.pool().num_groups());
  nb::list out;
  for (size_t i = 0; i < kNumFields; ++i) {
    out.append(nb::make_tuple(kNames[i], layout[static_cast<Field>(i)].offset));
  }
  return out;
}

void Commit(Planner& planner, int64_t buffer,
            const std::optional<Counts>& accepted) {
  std::span<const int32_t> kept;
  if (accepted) kept = {accepted->data(), accepted->shape(0)};
  if (accepted && kept.empty() && planner.buffer(buffer).num_seqs() > 0) {
    Raise(InvalidArgument("accepted is empty; the step has rows."));
  }
  RaiseIfError(planner.Commit(buffer, kept));
}

void BindSteps(nb::class_<Planner>& planner) {
  planner.def("step", &Step, "handles"_a.noconvert(), "counts"_a.noconvert())
      .def(
          "check",
          [](Planner& p, const Handles& handles, const Counts& counts) {
            RaiseIfError(p.Check({handles.data(), handles.shape(0)},
                                 {counts.data(), counts.shape(0)}));
          },
          "handles"_a, "counts"_a)
      .def("commit", &Commit, "buffer"_a, "accepted"_a = nb::none())
      .def(
          "abort",
          [](Planner& p, int64_t buffer) { RaiseIfError(p.Abort(buffer)); },
          "buffer"_a)
      .def(
          "retire",
          [](Planner& p, int64_t buffer) { RaiseIfError(p.Retire(buffer)); },
          "buffer"_a)
      .def("memory", &Memory, "buffer"_a, nb::rv_policy::reference)
      .def("copy", &Copy, "buffer"_a, "max_num_seqs"_a, "max_num_tokens"_a)
      .def("layout", &Layout, "max_num_seqs"_a, "max_num_tokens"_a)
      .def(
          "order",
          [](const Planner& p, int64_t buffer) {
            return Copied(p.buffer(buffer).order);
          },
          "buffer"_a)
      .def("delta_indices",
           [](const Planner& p) { return Copied(p.delta().indices); })
      .def("delta_pages",
           [](const Planner& p) { return Copied(p.delta().pages); });
}

}  // namespace

void BindPlanner(nb::module_& m) {
  nb::class_<Planner> planner(m, "Planner", "Writes the metadata of a step.");
  planner.def(
      nb::new_([](std::shared_ptr<PagePool> pool, int64_t max_num_tokens,
                  int64_t max_num_seqs, int64_t pages_per_seq, int64_t ring,
                  std::vector<int64_t> token_buckets,
                  std::vector<int64_t> seq_buckets, int64_t prefill_chunk,
                  bool keep_rows, bool track_delta) {
        return ValueOrRaise(Planner::Create(
            std::move(pool),
            {.sizes = {max_num_tokens, max_num_seqs, pages_per_seq},
             .ring = ring,
             .token_buckets = std::move(token_buckets),
             .seq_buckets = std::move(seq_buckets),
             .prefill_chunk = prefill_chunk,
             .keep_rows = keep_rows,
             .track_delta = track_delta}));
      }),
      "pool"_a, "max_num_tokens"_a, "max_num_seqs"_a, "pages_per_seq"_a,
      "ring"_a, "token_buckets"_a, "seq_buckets"_a, "prefill_chunk"_a,
      "keep_rows"_a, "track_delta"_a);
  BindSteps(planner);
}

}  // namespace pagemill::bindings
