// One item of work, and the functions that run it on each instruction set.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_H_

#include <cstdint>

#include "csrc/core/attention/ragged_paged_attention.h"

namespace pagemill::attention {

// Queries [q_begin, q_begin + q_count) of the token buffer, all of one
// sequence, against one KV head.
struct Item {
  int64_t seq;
  int64_t kv_head;
  int64_t q_begin;
  int64_t q_count;
};

using Kernel = void (*)(const RaggedPagedAttentionArgs&, const Item&);

// Rows (queries times query heads per KV head) of an item, at most, unless one
// query alone has more.
inline constexpr int64_t kMaxRows = 96;

namespace portable {
void Run(const RaggedPagedAttentionArgs& args, const Item& item);
}
namespace avx2 {
void Run(const RaggedPagedAttentionArgs& args, const Item& item);
}
namespace avx512 {
void Run(const RaggedPagedAttentionArgs& args, const Item& item);
}

}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_H_
