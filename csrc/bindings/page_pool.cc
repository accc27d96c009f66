#include "csrc/core/pool/page_pool.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <span>
#include <tuple>
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
using Tokens = Input<int32_t, 1>;

std::span<const uint8_t> BytesOf(const nb::bytes& bytes) {
  return {static_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

std::span<const int32_t> SpanOf(const Tokens& tokens) {
  return {tokens.data(), tokens.shape(0)};
}

Int32Output<1> Vector(std::vector<int32_t> values) {
  const size_t size = values.size();
  return TakeOver<1>(std::move(values), {size});
}

// [slots, groups].
Int32Output<2> Slots(const PagePool& pool, std::vector<int32_t> pages) {
  const size_t groups = static_cast<size_t>(pool.num_groups());
  const size_t slots = pages.size() / groups;
  return TakeOver<2>(std::move(pages), {slots, groups});
}

Int32Output<2> Pairs(const std::vector<PageCopy>& copies) {
  std::vector<int32_t> flat;
  flat.reserve(2 * copies.size());
  for (const PageCopy& copy : copies) {
    flat.push_back(copy.source);
    flat.push_back(copy.target);
  }
  return TakeOver<2>(std::move(flat), {copies.size(), 2});
}

Pool MakePool(int64_t total_num_pages, int64_t page_size,
              std::vector<int64_t> sliding_windows, bool prefix_cache,
              const nb::bytes& secret, int64_t max_events) {
  const auto bytes = BytesOf(secret);
  return ValueOrRaise(PagePool::Create({
      .total_num_pages = total_num_pages,
      .page_size = page_size,
      .sliding_windows = std::move(sliding_windows),
      .prefix_cache = prefix_cache,
      .secret = {bytes.begin(), bytes.end()},
      .max_events = max_events,
  }));
}

std::pair<SequenceHandle, int64_t> Open(PagePool& pool, const Tokens& tokens,
                                        const nb::bytes& salt) {
  const auto ids = SpanOf(tokens);
  const auto bytes = BytesOf(salt);
  const PagePool::Opened opened = [&] {
    nb::gil_scoped_release release;
    return pool.Open(ids, bytes);
  }();
  return {opened.handle, opened.num_cached_tokens};
}

int64_t Probe(const PagePool& pool, const Tokens& tokens,
              const nb::bytes& salt) {
  const auto ids = SpanOf(tokens);
  const auto bytes = BytesOf(salt);
  nb::gil_scoped_release release;
  return pool.Probe(ids, bytes);
}

void Extend(PagePool& pool, SequenceHandle handle, const Tokens& tokens) {
  RaiseIfError(pool.Extend(handle, SpanOf(tokens)));
}

nb::typed<nb::dict, nb::str, nb::int_> StatsOf(const PagePool& pool) {
  const PagePoolStats stats = pool.Stats();
  nb::dict out;
  constexpr std::array<const char*, kNumPageStates> kNames = {
      "free", "reserved", "written", "published", "evictable", "fenced"};
  for (size_t i = 0; i < kNames.size(); ++i) out[kNames[i]] = stats.pages[i];
  out["sequences"] = stats.sequences;
  out["steps_in_flight"] = stats.steps_in_flight;
  out["held_slots"] = stats.held_slots;
  out["held_tokens"] = stats.held_tokens;
  out["looked_up_tokens"] = stats.looked_up_tokens;
  out["hit_tokens"] = stats.hit_tokens;
  out["evictions"] = stats.evictions;
  return out;
}

// ([(kind, page, key of 16 bytes)], dropped).
using Event = nb::typed<nb::tuple, nb::int_, nb::int_, nb::bytes>;
nb::typed<nb::tuple, nb::typed<nb::list, Event>, nb::int_> TakeEvents(
    PagePool& pool) {
  int64_t dropped = 0;
  nb::list events;
  for (const PageEvent& event : pool.TakeEvents(&dropped)) {
    events.append(nb::make_tuple(static_cast<int>(event.kind), event.page,
                                 nb::bytes(&event.key, sizeof(event.key))));
  }
  return nb::make_tuple(events, dropped);
}

void BindSequences(nb::class_<PagePool>& pool) {
  pool.def("open", &Open, "tokens"_a, "salt"_a)
      .def("probe", &Probe, "tokens"_a, "salt"_a)
      .def("extend", &Extend, "handle"_a, "tokens"_a)
      .def(
          "close",
          [](PagePool& p, SequenceHandle h) { RaiseIfError(p.Close(h)); },
          "handle"_a)
      .def(
          "fork",
          [](PagePool& p, SequenceHandle h) { return ValueOrRaise(p.Fork(h)); },
          "handle"_a)
      .def(
          "truncate",
          [](PagePool& p, SequenceHandle h, int64_t length) {
            RaiseIfError(p.Truncate(h, length));
          },
          "handle"_a, "length"_a)
      .def(
          "length",
          [](const PagePool& p, SequenceHandle h) {
            return ValueOrRaise(p.Length(h));
          },
          "handle"_a)
      .def(
          "committed_length",
          [](const PagePool& p, SequenceHandle h) {
            return ValueOrRaise(p.CommittedLength(h));
          },
          "handle"_a)
      .def(
          "pages",
          [](const PagePool& p, SequenceHandle h, int64_t group) {
            return Vector(ValueOrRaise(p.PagesOf(h, group)));
          },
          "handle"_a, "group"_a);
}

void BindPreemption(nb::class_<PagePool>& pool) {
  pool.def(
          "preempt",
          [](PagePool& p, SequenceHandle h) { RaiseIfError(p.Preempt(h)); },
          "handle"_a)
      .def(
          "resume",
          [](PagePool& p, SequenceHandle h) {
            return ValueOrRaise(p.Resume(h));
          },
          "handle"_a)
      .def(
          "begin_swap_out",
          [](PagePool& p, SequenceHandle h) {
            return Slots(p, ValueOrRaise(p.BeginSwapOut(h)));
          },
          "handle"_a)
      .def(
          "end_swap_out",
          [](PagePool& p, SequenceHandle h) { RaiseIfError(p.EndSwapOut(h)); },
          "handle"_a)
      .def(
          "swap_in",
          [](PagePool& p, SequenceHandle h) {
            return Slots(p, ValueOrRaise(p.SwapIn(h)));
          },
          "handle"_a);
}

void BindWhole(nb::class_<PagePool>& pool) {
  pool.def("take_page_copies",
           [](PagePool& p) { return Pairs(p.TakePageCopies()); })
      .def(
          "reference_count",
          [](const PagePool& p, int64_t page) {
            return ValueOrRaise(p.ReferenceCount(page));
          },
          "page"_a)
      .def(
          "state",
          [](const PagePool& p, int64_t page) {
            return static_cast<int>(ValueOrRaise(p.StateOf(page)));
          },
          "page"_a, "The page's state, as the place of its name in stats().")
      .def("stats", &StatsOf)
      .def("clear_cache", &PagePool::ClearCache)
      .def("take_events", &TakeEvents)
      .def("audit",
           [](const PagePool& p) {
             const Status status = [&] {
               nb::gil_scoped_release release;
               return p.Audit();
             }();
             RaiseIfError(status);
           })
      .def_prop_ro("total_num_pages", &PagePool::total_num_pages)
      .def_prop_ro("page_size", &PagePool::page_size)
      .def_prop_ro("num_groups", &PagePool::num_groups)
      .def_prop_ro("num_free_pages", &PagePool::num_free_pages)
      .def_prop_ro("num_available_pages", &PagePool::num_available_pages)
      .def_prop_ro("num_sequences", &PagePool::num_sequences);
}

}  // namespace

void BindPagePool(nb::module_& m) {
  nb::class_<PagePool> pool(m, "PagePool", "Reference-counted pages.");
  pool.def(nb::new_(&MakePool), "total_num_pages"_a, "page_size"_a,
           "sliding_windows"_a, "prefix_cache"_a, "secret"_a, "max_events"_a);
  BindSequences(pool);
  BindPreemption(pool);
  BindWhole(pool);
}

}  // namespace pagemill::bindings
