// One work item: some query tokens of a sequence against one KV head.
//
// The item's rows (its tokens times the head's group) meet the keys block by
// block, with an online softmax.
//
// Only for the kernel_*.cc files, see vector-inl.h.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_INL_H_

#include <cstdint>

#include "csrc/core/attention/decode-inl.h"
#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/prefill-inl.h"

namespace pagemill::attention {
namespace {

// More rows than these reuse a packed block often enough to pay for it.
inline constexpr int64_t kMaxDecodeRows = 16;

template <typename Element>
void RunItem(const Problem& p, const Item& item, float* scratch) {
  // Decode masks nothing, and a tree may hide a token from itself.
  const bool few = item.num_tokens == 1 && p.group <= kMaxDecodeRows;
  if (few && p.tree_mask == nullptr) {
    RunDecode<Element>(p, item, scratch);
  } else {
    RunPrefill<Element>(p, item, scratch);
  }
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_INL_H_
