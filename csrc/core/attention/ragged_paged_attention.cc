#include "csrc/core/attention/ragged_paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/work.h"
#include "csrc/core/isa.h"
#include "csrc/core/x86.h"

namespace pagemill {
namespace attention {

int64_t ScratchFloats(int64_t rows, int64_t head_dim) {
  const auto padded = [](int64_t x) {
    return (x + kMaxLanes - 1) / kMaxLanes * kMaxLanes;
  };
  return padded(rows) * (2 * padded(head_dim) + kBlockKv + 3) +
         2 * kBlockKv * padded(head_dim);
}

namespace {

// A helper's share below this is done sooner alone than after a wake-up.
constexpr double kNanosecondsPerHelper = 50e3;

const Kernels& KernelsFor(Isa isa) {
#if PAGEMILL_X86
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  (void)isa;
  return kPortableKernels;
}

// A thread's scratch, kept between calls.
class Arena {
 public:
  static Arena& OfThread() {
    thread_local Arena arena;
    return arena;
  }

  // Null when there is no memory.
  float* Reserve(int64_t floats) {
    if (floats > capacity_) {
      capacity_ = 0;
      storage_.reset();
      storage_.reset(static_cast<float*>(
          ::operator new(static_cast<size_t>(floats) * sizeof(float),
                         std::align_val_t{kAlignment}, std::nothrow)));
      if (storage_ != nullptr) capacity_ = floats;
    }
    return storage_.get();
  }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(float* p) const {
      ::operator delete(p, std::align_val_t{kAlignment});
    }
  };
  std::unique_ptr<float, Free> storage_;
  int64_t capacity_ = 0;
};

void FillDeadRows(const RaggedPagedAttentionArgs& args) {
  const BatchView& b = args.batch;
  const int64_t live = b.num_seqs == 0 ? 0 : b.cu_q_lens[b.num_seqs];
  const int64_t row =
      args.num_q_heads * args.head_dim * (args.dtype == DType::kF32 ? 4 : 2);
  std::memset(static_cast<char*>(args.out) + live * row, 0,
              static_cast<size_t>((b.max_num_tokens - live) * row));
  if (args.lse == nullptr) return;
  std::fill(args.lse + live * args.num_q_heads,
            args.lse + b.max_num_tokens * args.num_q_heads,
            -std::numeric_limits<float>::infinity());
}

Kernel KernelFor(const Kernels& kernels, DType kv_dtype) {
  switch (kv_dtype) {
    case DType::kF32:
      return kernels.f32;
    case DType::kBF16:
      return kernels.bf16;
    case DType::kF8E4M3:
      return kernels.f8e4m3;
    case DType::kF8E5M2:
      return kernels.f8e5m2;
    case DType::kI8:
      return kernels.i8;
  }
  return nullptr;
}

Status Run(const RaggedPagedAttentionArgs& args, Executor& executor,
           const Kernels& kernels) {
  if (args.num_q_heads * args.head_dim * args.batch.max_num_tokens == 0) {
    return Status();
  }
  FillDeadRows(args);
  const Work work = Divide(args);
  const Kernel kernel = KernelFor(kernels, args.kv_dtype);
  const int64_t scratch = ScratchFloats(work.max_rows, args.head_dim);
  std::atomic<bool> out_of_memory{false};
  ParallelFor(executor, static_cast<int64_t>(work.items.size()),
              static_cast<int64_t>(work.nanoseconds / kNanosecondsPerHelper),
              [&](int64_t i) {
                float* floats = Arena::OfThread().Reserve(scratch);
                if (floats == nullptr) {
                  out_of_memory.store(true, std::memory_order_relaxed);
                  return;
                }
                kernel(work.problem, work.items[i], floats);
              });
  return out_of_memory.load(std::memory_order_relaxed)
             ? Internal("Out of memory for the scratch of attention.")
             : Status();
}

}  // namespace
}  // namespace attention

Status RaggedPagedAttention(const RaggedPagedAttentionArgs& args,
                            Executor& executor) {
  const Result<Isa> isa = DefaultIsa();
  if (!isa.ok()) return isa.status();
  return attention::Run(args, executor, attention::KernelsFor(isa.value()));
}

Status RaggedPagedAttention(const RaggedPagedAttentionArgs& args,
                            Executor& executor, std::string_view isa) {
  const Result<Isa> found = FindIsa(isa);
  if (!found.ok()) return found.status();
  return attention::Run(args, executor, attention::KernelsFor(found.value()));
}

std::vector<std::string_view> AvailableIsas() {
  std::vector<std::string_view> names;
  for (const Isa isa : Isas()) names.push_back(IsaName(isa));
  return names;
}

}  // namespace pagemill
