// Ragged paged attention on CPUs.
//
// An online softmax over blocks of keys, in float32 whatever the inputs are.
// Work is cut into (sequence, KV head, block of queries); what an item computes
// depends on its sequence alone, so a result does not change with neighbours
// or thread count.  Cost O(visible keys * heads * head_dim): blocks outside of
// the window or above the diagonal are skipped.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_RAGGED_PAGED_ATTENTION_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_RAGGED_PAGED_ATTENTION_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/core/attention/kv_layout.h"
#include "csrc/core/batch_view.h"
#include "csrc/core/executor.h"
#include "csrc/core/status.h"

namespace pagemill {

// The 8-bit types are for keys and values only.
enum class DType { kF32, kBF16, kF8E4M3, kF8E5M2, kI8 };

struct RaggedPagedAttentionArgs {
  const void* q = nullptr;  // [T, num_q_heads, head_dim]
  const void* kv_pages = nullptr;
  void* out = nullptr;           // as q; every row is written
  float* lse = nullptr;          // [T, num_q_heads]; null: not wanted
  DType dtype = DType::kF32;     // of q and out
  DType kv_dtype = DType::kF32;  // as dtype, or 8-bit
  KvStrides kv;
  BatchView batch;  // structure proved by Validate

  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_q_heads
  int64_t head_dim = 0;

  float sm_scale = 1.0f;
  float soft_cap = 0.0f;       // 0: none
  int64_t sliding_window = 0;  // 0: none
  bool causal = true;

  // Each null when absent.
  const float* sinks = nullptr;    // [num_q_heads]: a logit without a value
  const float* k_scale = nullptr;  // [num_kv_heads]: factors on stored keys
  const float* v_scale = nullptr;  // [num_kv_heads]: and values
  // [T, tree_words]: bit j of a token says whether it sees its sequence's j-th
  // token of this step; takes the place of `causal`.
  const uint32_t* tree_mask = nullptr;
  int64_t tree_words = 0;
};

// Query i of a sequence stands at kv_len - q_len + i and sees the keys up to
// there (causal), of them the last `sliding_window`.  Dead rows, and rows with
// no visible key, are written as 0, with an lse of the sink or -inf.  Dead rows
// of q, dead page slots and tokens past kv_len are never read; a masked key
// adds nothing to a row, whatever it and its value hold.
//   kInvalidArgument: PAGEMILL_CPU_ISA names no instruction set of this
//     machine.
Status RaggedPagedAttention(const RaggedPagedAttentionArgs& args,
                            Executor& executor);

// The same on one instruction set of AvailableIsas().
Status RaggedPagedAttention(const RaggedPagedAttentionArgs& args,
                            Executor& executor, std::string_view isa);

// Instruction sets that this machine runs, the best first.
std::vector<std::string_view> AvailableIsas();

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_RAGGED_PAGED_ATTENTION_H_
