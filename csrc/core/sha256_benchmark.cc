#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "csrc/core/prefix_key.h"
#include "csrc/core/sha256.h"

namespace pagemill {
namespace {

constexpr int64_t kPages = 256;

void SetPageTime(benchmark::State& state) {
  state.counters["time/page"] = benchmark::Counter(
      static_cast<double>(state.iterations() * kPages),
      benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

// The keys of one sequence, by the implementation this CPU gets.
void BM_PrefixKeys(benchmark::State& state) {
  const int64_t page_size = state.range(0);
  std::vector<int32_t> tokens(kPages * page_size);
  std::iota(tokens.begin(), tokens.end(), 0);
  const PrefixChain chain({}, {}, page_size);
  std::vector<Sha256Digest> keys(kPages);
  for (auto _ : state) {
    PrefixChain::ExtendMany(chain.Root(), tokens, page_size, keys.data());
    benchmark::DoNotOptimize(keys.data());
    benchmark::ClobberMemory();
  }
  SetPageTime(state);
}
BENCHMARK(BM_PrefixKeys)
    ->ArgName("page_size")
    ->Arg(16)
    ->Arg(24)
    ->Arg(32)
    ->Arg(64)
    ->Arg(128);

// The two blocks that a page of 16 tokens costs, each after the one before.
void BM_CompressPages(benchmark::State& state,
                      Sha256CompressFunction* compress) {
  if (!compress) return state.SkipWithError("no SHA instructions here");
  const std::vector<uint8_t> blocks(2 * kSha256BlockSize, 1);
  auto hash = kSha256Initial;
  for (auto _ : state) {
    for (int64_t i = 0; i < kPages; ++i) {
      compress(hash.data(), blocks.data(), 2);
    }
    benchmark::DoNotOptimize(hash);
  }
  SetPageTime(state);
}
BENCHMARK_CAPTURE(BM_CompressPages, native, internal::Sha256CompressNative());
BENCHMARK_CAPTURE(BM_CompressPages, portable, internal::Sha256CompressPortable);

}  // namespace
}  // namespace pagemill
