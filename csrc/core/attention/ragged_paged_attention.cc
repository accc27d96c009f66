#include "csrc/core/attention/ragged_paged_attention.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

using attention::Item;
using attention::Kernel;
using attention::kMaxRows;

// A scheduled task costs some 10 us; work below this many multiply-adds is
// done sooner alone.
constexpr double kWorkPerHelper = 4e6;

struct Isa {
  std::string_view name;
  Kernel run;
};

// The best first.
std::vector<Isa> DetectIsas() {
  std::vector<Isa> isas;
#if defined(__x86_64__) && !defined(PAGEMILL_SCALAR)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("bmi2")) {
    isas.push_back({"avx512", &attention::avx512::Run});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("bmi2")) {
    isas.push_back({"avx2", &attention::avx2::Run});
  }
#endif
  isas.push_back({"portable", &attention::portable::Run});
  return isas;
}

const std::vector<Isa>& Isas() {
  static const std::vector<Isa> isas = DetectIsas();
  return isas;
}

Result<Kernel> FindKernel(std::string_view name) {
  std::string names;
  for (const Isa& isa : Isas()) {
    if (isa.name == name) return isa.run;
    names += StrCat(names.empty() ? "" : ", ", isa.name);
  }
  return InvalidArgument(StrCat("PAGEMILL_CPU_ISA=", name,
                                " is not an instruction set of this machine "
                                "and build, which have ",
                                names, ". Unset it to take the first."));
}

Result<Kernel> DefaultKernel() {
  static const Result<Kernel> kernel = [] {
    const char* forced = std::getenv("PAGEMILL_CPU_ISA");
    return forced == nullptr || *forced == '\0'
               ? Result<Kernel>(Isas().front().run)
               : FindKernel(forced);
  }();
  return kernel;
}

// Long sequences first, so that no thread starts the longest one last.
std::vector<Item> MakeItems(const RaggedPagedAttentionArgs& args) {
  const BatchView& b = args.batch;
  const int64_t group = args.num_q_heads / args.num_kv_heads;
  const int64_t step = std::max<int64_t>(kMaxRows / group, 1);
  std::vector<Item> items;
  for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
    for (int64_t q = 0; q < b.q_len(seq); q += step) {
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        items.push_back({seq, head, b.q_begin(seq) + q,
                         std::min(step, b.q_len(seq) - q)});
      }
    }
  }
  std::stable_sort(items.begin(), items.end(),
                   [&](const Item& x, const Item& y) {
                     return b.kv_len(x.seq) * x.q_count >
                            b.kv_len(y.seq) * y.q_count;
                   });
  return items;
}

int64_t Helpers(const RaggedPagedAttentionArgs& args) {
  double work = 0;
  for (int64_t seq = 0; seq < args.batch.num_seqs; ++seq) {
    work += static_cast<double>(args.batch.q_len(seq)) *
            static_cast<double>(args.batch.kv_len(seq));
  }
  work *= 2.0 * static_cast<double>(args.num_q_heads * args.head_dim);
  return static_cast<int64_t>(work / kWorkPerHelper);
}

void ZeroDeadRows(const RaggedPagedAttentionArgs& args) {
  const BatchView& b = args.batch;
  const int64_t live = b.num_seqs == 0 ? 0 : b.cu_q_lens[b.num_seqs];
  const int64_t row = args.num_q_heads * args.head_dim *
                      (args.dtype == DType::kF32 ? 4 : 2);
  std::memset(static_cast<char*>(args.out) + live * row, 0,
              static_cast<size_t>((b.max_num_tokens - live) * row));
}

void RunAll(const RaggedPagedAttentionArgs& args, Executor& executor,
            Kernel kernel) {
  ZeroDeadRows(args);
  const std::vector<Item> items = MakeItems(args);
  ParallelFor(executor, static_cast<int64_t>(items.size()), Helpers(args),
              [&](int64_t i) { kernel(args, items[i]); });
}

}  // namespace

Status RaggedPagedAttention(const RaggedPagedAttentionArgs& args,
                            Executor& executor) {
  const Result<Kernel> kernel = DefaultKernel();
  if (!kernel.ok()) return kernel.status();
  RunAll(args, executor, kernel.value());
  return Status();
}

Status RaggedPagedAttention(const RaggedPagedAttentionArgs& args,
                            Executor& executor, std::string_view isa) {
  const Result<Kernel> kernel = FindKernel(isa);
  if (!kernel.ok()) return kernel.status();
  RunAll(args, executor, kernel.value());
  return Status();
}

std::vector<std::string_view> AvailableIsas() {
  std::vector<std::string_view> names;
  for (const Isa& isa : Isas()) names.push_back(isa.name);
  return names;
}

}  // namespace pagemill
