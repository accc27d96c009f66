// Decode and prefill on each instruction set, with and without a helper.
//
// 32 query heads on 8 KV heads of 128, pages of 16 tokens, shuffled.  Decode
// reports bytes of KV per second, prefill useful multiplications and additions
// (those above the diagonal left out).
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "csrc/core/attention/ragged_paged_attention.h"
#include "csrc/core/attention/test_batch.h"
#include "csrc/core/thread_executor.h"

namespace pagemill {
namespace {

constexpr int64_t kQHeads = 32;
constexpr int64_t kKvHeads = 8;
constexpr int64_t kHeadDim = 128;

TestShape Shape(std::vector<Sequence> sequences, DType dtype) {
  return {.sequences = std::move(sequences),
          .num_q_heads = kQHeads,
          .num_kv_heads = kKvHeads,
          .head_dim = kHeadDim,
          .page_size = 16,
          .dtype = dtype,
          .sm_scale = 0.088f};
}

void Run(benchmark::State& state, TestBatch& batch, std::string_view isa,
         int64_t helpers) {
  ThreadExecutor executor(helpers);
  const RaggedPagedAttentionArgs args = batch.Args();
  for (auto _ : state) {
    const Status status = RaggedPagedAttention(args, executor, isa);
    if (!status.ok()) state.SkipWithError(status.message().c_str());
  }
}

void Decode(benchmark::State& state, std::string_view isa, DType dtype,
            int64_t helpers) {
  std::vector<Sequence> sequences;
  int64_t tokens = 0;
  for (int64_t i = 0; i < 16; ++i) {
    sequences.push_back({1, 200 + i * 257});
    tokens += sequences.back().kv_len;
  }
  TestBatch batch(Shape(sequences, dtype), 0);
  Run(state, batch, isa, helpers);
  const int64_t element = dtype == DType::kF32 ? 4 : 2;
  state.SetBytesProcessed(state.iterations() * tokens * 2 * kKvHeads *
                          kHeadDim * element);
}

void Prefill(benchmark::State& state, std::string_view isa, DType dtype,
             int64_t helpers) {
  constexpr int64_t kTokens = 1024;
  TestBatch batch(Shape({{kTokens, kTokens}}, dtype), 0);
  Run(state, batch, isa, helpers);
  const double flops = 4.0 * (kTokens * (kTokens + 1) / 2) * kQHeads * kHeadDim;
  state.counters["FLOP/s"] =
      benchmark::Counter(flops * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
}

void SmallDecode(benchmark::State& state, std::string_view isa, DType dtype,
                 int64_t helpers) {
  TestBatch batch(Shape({{1, 64}}, dtype), 0);
  Run(state, batch, isa, helpers);
}

const bool kRegistered = [] {
  using Function =
      void (*)(benchmark::State&, std::string_view, DType, int64_t);
  for (const auto& [name, function] :
       {std::pair<std::string, Function>{"Decode", Decode},
        {"Prefill", Prefill},
        {"SmallDecode", SmallDecode}}) {
    for (std::string_view isa : AvailableIsas()) {
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        for (int64_t helpers : {0, 1}) {
          const std::string full = name + "/" + std::string(isa) +
                                   (dtype == DType::kF32 ? "/f32" : "/bf16") +
                                   "/threads:" + std::to_string(helpers + 1);
          benchmark::RegisterBenchmark(
              full.c_str(),
              [=, run = function](benchmark::State& state) {
                run(state, isa, dtype, helpers);
              })
              ->UseRealTime()
              ->Unit(benchmark::kMicrosecond);
        }
      }
    }
  }
  return true;
}();

}  // namespace
}  // namespace pagemill
