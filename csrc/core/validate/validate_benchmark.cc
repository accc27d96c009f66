// What proving a batch costs, with each scan of the table, next to reading its
// live page slots once.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/passes.h"
#include "csrc/core/validate/scanners.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill {
namespace {

constexpr int64_t kPageSize = 16;
constexpr int64_t kOffenders = 100;

// Decodes of rows that are half live; the pool is as large as the live slots,
// and in no order.
struct Batch {
  Batch(int64_t seqs, int64_t width)
      : seqs(seqs),
        width(width),
        kv_lens(seqs, static_cast<int32_t>(width / 2 * kPageSize)),
        page_indices(seqs * width, -1),
        cu_q_lens(seqs + 1) {
    std::vector<int32_t> pages(seqs * (width / 2));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), std::mt19937(0));
    for (int64_t seq = 0; seq < seqs; ++seq) {
      std::copy_n(pages.begin() + seq * (width / 2), width / 2,
                  page_indices.begin() + seq * width);
    }
    std::iota(cu_q_lens.begin(), cu_q_lens.end(), 0);
  }

  // Five kinds in turn, evenly spread over distinct rows.
  void Damage() {
    const int64_t last = width / 2 - 1;
    for (int64_t i = 0; i < kOffenders; ++i) {
      const int64_t seq = 1 + i * (seqs - 2) / kOffenders;
      int32_t* row = &page_indices[seq * width];
      const int32_t* before = row - width;
      switch (i % 5) {
        case 0:
          row[seq % last] = -1;
          break;
        case 1:
          kv_lens[seq] = static_cast<int32_t>(width * kPageSize + 1);
          break;
        case 2:
          kv_lens[seq] = 0;  // less than its query
          break;
        case 3:
          row[last] = before[0] < 0 ? before[1] : before[0];  // read there
          break;
        default:
          row[0] = row[last];  // written by the row itself
          break;
      }
    }
  }

  BatchView View() const {
    return {.kv_lens = kv_lens.data(),
            .page_indices = page_indices.data(),
            .cu_q_lens = cu_q_lens.data(),
            .num_seqs = seqs,
            .max_num_seqs = seqs,
            .pages_per_seq = width,
            .page_size = kPageSize,
            .total_num_pages = seqs * (width / 2),
            .max_num_tokens = seqs};
  }

  int64_t seqs, width;
  std::vector<int32_t> kv_lens, page_indices, cu_q_lens;
};

void Accept(benchmark::State& state, const internal::TableScanner& scanner,
            Level level) {
  const Batch batch(state.range(0), state.range(1));
  const BatchView view = batch.View();
  for (auto _ : state) {
    if (!internal::Accepts(view, level, scanner)) {
      state.SkipWithError("a good batch is refused");
      break;
    }
  }
}

// Both passes, as Validate makes them.
void Reject(benchmark::State& state, const internal::TableScanner& scanner,
            Level level) {
  Batch batch(state.range(0), state.range(1));
  batch.Damage();
  const BatchView view = batch.View();
  size_t found = 0;
  for (auto _ : state) {
    found = internal::Locate(view, level, scanner).size();
    benchmark::DoNotOptimize(found);
  }
  state.counters["offenders"] = static_cast<double>(found);
}

// The least that any check of page ids must do, with the next rows fetched as
// the checks do.
void ReadLiveSlots(benchmark::State& state) {
  constexpr int64_t kPagesPerWord = sizeof(uint64_t) / sizeof(int32_t);
  constexpr int64_t kLanes = 8;  // so that loads need not wait for each other
  const Batch batch(state.range(0), state.range(1));
  for (auto _ : state) {
    uint64_t seen[kLanes] = {};
    for (int64_t seq = 0; seq < batch.seqs; ++seq) {
      const int32_t* row = &batch.page_indices[seq * batch.width];
      const int64_t next = std::min(seq + 4, batch.seqs - 1);
      const int32_t* ahead = &batch.page_indices[next * batch.width];
      for (int64_t i = 0; i < batch.width / 2; i += kLanes * kPagesPerWord) {
        __builtin_prefetch(ahead + i);
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          uint64_t word;
          std::memcpy(&word, row + i + lane * kPagesPerWord, sizeof(word));
          seen[lane] |= word;
        }
      }
    }
    benchmark::DoNotOptimize(seen);
  }
}

void Shapes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"seqs", "pages"})
      ->Args({256, 64})
      ->Args({1024, 512})
      ->Args({8192, 512})
      ->Unit(benchmark::kMicrosecond);
}

[[maybe_unused]] const bool registered = [] {
  Shapes(benchmark::RegisterBenchmark("ReadLiveSlots", ReadLiveSlots));
  for (const internal::TableScanner* scanner : internal::TableScanners()) {
    for (const Level level : {Level::kStructure, Level::kFull}) {
      const std::string suffix =
          std::string(level == Level::kFull ? "Full/" : "Structure/") +
          scanner->name;
      Shapes(benchmark::RegisterBenchmark(("Accept" + suffix).c_str(), Accept,
                                          *scanner, level));
      Shapes(benchmark::RegisterBenchmark(("Reject" + suffix).c_str(), Reject,
                                          *scanner, level));
    }
  }
  return true;
}();

}  // namespace
}  // namespace pagemill
