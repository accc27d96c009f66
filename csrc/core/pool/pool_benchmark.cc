// What a page costs: taken, released, evicted, keyed, looked up.  Items are
// pages; //benchmarks:metadata reads items_per_second.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "csrc/core/pool/page_pool.h"
#include "csrc/core/pool/pages.h"
#include "csrc/core/prefix_key.h"

namespace pagemill {
namespace {

constexpr int64_t kPages = 250'000;
constexpr int64_t kBatch = 4096;

// As if a digest (SplitMix64's mixing).
PageKey Key(uint64_t i) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  };
  return {mix(2 * i), mix(2 * i + 1)};
}

// As the pool does over a sequence's keys.
void Prefetch(const Pages& pages, const std::vector<PageKey>& keys,
              size_t next) {
  if (next + 12 >= keys.size()) return;
  pages.PrefetchBucket(keys[next + 12]);
  pages.PrefetchEntry(keys[next + 6]);
}

void TakeAndRelease(benchmark::State& state) {
  Pages pages(kPages, true, 0);
  std::vector<int32_t> taken(kBatch);
  for (auto _ : state) {
    for (int32_t& page : taken) page = pages.Take();
    for (int64_t i = kBatch; i-- > 0;) pages.Release(taken[i]);
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK(TakeAndRelease);

// Fills the cache: every page published under a new key and released.
void Fill(Pages& pages, uint64_t* next_key) {
  std::vector<int32_t> taken;
  while (pages.available() > 0) taken.push_back(pages.Take());
  for (int32_t page : taken) {
    pages.Commit(page);
    pages.Publish(page, Key(++*next_key));
  }
  for (int32_t page : taken) pages.Release(page);
}

// Every page taken is evicted from a full cache.
void EvictAndRelease(benchmark::State& state) {
  Pages pages(kPages, true, 0);
  uint64_t next_key = 0;
  Fill(pages, &next_key);
  std::vector<int32_t> taken(kBatch);
  for (auto _ : state) {
    for (int32_t& page : taken) page = pages.Take();
    state.PauseTiming();
    for (int32_t page : taken) {
      pages.Commit(page);
      pages.Publish(page, Key(++next_key));
    }
    state.ResumeTiming();
    for (int64_t i = kBatch; i-- > 0;) pages.Release(taken[i]);
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK(EvictAndRelease);

void KeyPages(benchmark::State& state) {
  const int64_t page_size = 16;
  std::vector<int32_t> tokens(kBatch * page_size);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<Sha256Digest> keys(kBatch);
  const Sha256Digest root = PrefixChain({}, {}, page_size).Root();
  for (auto _ : state) {
    PrefixChain::ExtendMany(root, tokens, page_size, keys.data());
    benchmark::DoNotOptimize(keys.back());
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK(KeyPages);

void LookUp(benchmark::State& state) {
  Pages pages(kPages, true, 0);
  std::vector<PageKey> keys(kPages / 2);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = Key(i);
    const int32_t page = pages.Take();
    pages.Commit(page);
    pages.Publish(page, keys[i]);
  }
  std::shuffle(keys.begin(), keys.end(), std::mt19937(0));
  size_t next = 0;
  for (auto _ : state) {
    for (int64_t i = 0; i < kBatch; ++i) {
      Prefetch(pages, keys, next);
      benchmark::DoNotOptimize(pages.Lookup(keys[next]));
      next = next + 1 == keys.size() ? 0 : next + 1;
    }
  }
  state.SetItemsProcessed(state.iterations() * kBatch);
}
BENCHMARK(LookUp);

}  // namespace
}  // namespace pagemill
