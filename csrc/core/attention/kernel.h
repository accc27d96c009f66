// What the driver shares with the kernels, which are compiled once per
// instruction set; see csrc/core/isa.h for why there is only plain data here.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_H_

#include <cstdint>

#include "csrc/core/attention/kv_layout.h"
#include "csrc/core/x86.h"

namespace pagemill::attention {

// Keys of a block; blocks start at its multiples.
inline constexpr int64_t kBlockKv = 64;
// Rows (query tokens times query heads per KV head) that an item aims at; a
// single token may have more.
inline constexpr int64_t kTargetRows = 192;
// Matrices are padded to whole vectors of the widest instruction set.
inline constexpr int64_t kMaxLanes = 16;

struct Problem {
  const void* q;  // [T, Hq, D]
  const void* kv_pages;
  void* out;    // [T, Hq, D]
  float* lse;   // [T, Hq] or null
  bool narrow;  // q and out are bf16, else f32
  KvStrides kv;
  int64_t num_kv_heads;
  int64_t group;  // query heads of a KV head
  int64_t head_dim;
  int64_t page_size;
  int64_t sliding_window;  // 0: none; otherwise at most kWidestWindow
  float sm_scale;
  float soft_cap;  // 0: none
  bool causal;
  // As in RaggedPagedAttentionArgs.
  const float* sinks;
  const float* k_scale;
  const float* v_scale;
  const uint32_t* tree_mask;
  int64_t tree_words;
};

// Wider than any sequence, and far from overflow.
inline constexpr int64_t kWidestWindow = int64_t{1} << 32;

// Some query tokens of one sequence, with one KV head and its group.
struct Item {
  const int32_t* pages;    // of the sequence
  int64_t kv_len;          // of the sequence
  int64_t first_new;       // position of its first query token
  int64_t first_row;       // of q and out: the item's first token
  int64_t first_position;  // where that token stands
  int64_t num_tokens;
  int64_t kv_head;
};

// Floats of scratch for an item of that many rows.
int64_t ScratchFloats(int64_t rows, int64_t head_dim);

// `scratch` is aligned to 64 bytes and may hold anything.
using Kernel = void (*)(const Problem&, const Item&, float* scratch);

// By the type of keys and values.
struct Kernels {
  Kernel f32;
  Kernel bf16;
  Kernel f8e4m3;
  Kernel f8e5m2;
  Kernel i8;
};

extern const Kernels kPortableKernels;
#if PAGEMILL_X86
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_H_
