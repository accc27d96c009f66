#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "csrc/core/validate.h"

namespace pagemill {
namespace {

// Decodes of full rows: range(0) sequences of range(1) pages each.
void BM_Validate(benchmark::State& state) {
  const int64_t seqs = state.range(0), width = state.range(1);
  std::vector<int32_t> pages(seqs * width), cu_q_lens(seqs + 1);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), std::mt19937(0));
  std::iota(cu_q_lens.begin(), cu_q_lens.end(), 0);
  const std::vector<int32_t> kv_lens(seqs, static_cast<int32_t>(width * 16));
  const BatchView batch{.kv_lens = kv_lens.data(),
                        .page_indices = pages.data(),
                        .cu_q_lens = cu_q_lens.data(),
                        .num_seqs = seqs,
                        .max_num_seqs = seqs,
                        .pages_per_seq = width,
                        .page_size = 16,
                        .total_num_pages = seqs * width,
                        .max_num_tokens = seqs};
  const Level level = state.range(2) == 0 ? Level::kStructure : Level::kFull;
  for (auto _ : state) {
    benchmark::DoNotOptimize(Validate(batch, level).size());
  }
}
BENCHMARK(BM_Validate)
    ->ArgNames({"seqs", "pages", "full"})
    ->ArgsProduct({{64, 256, 1024, 4096}, {64}, {0, 1}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace pagemill
