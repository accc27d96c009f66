#include "csrc/core/attention/work.h"

#include <algorithm>
#include <cstdint>

#include "csrc/core/attention/kernel.h"

namespace pagemill::attention {
namespace {

constexpr double kFlopsPerNanosecond = 80;
constexpr double kKvElementsPerNanosecond = 6;

Problem MakeProblem(const RaggedPagedAttentionArgs& args) {
  Problem p;
  p.q = args.q;
  p.kv_pages = args.kv_pages;
  p.out = args.out;
  p.lse = args.lse;
  p.narrow = args.dtype == DType::kBF16;
  p.kv = args.kv;
  p.num_kv_heads = args.num_kv_heads;
  p.group = args.num_q_heads / args.num_kv_heads;
  p.head_dim = args.head_dim;
  p.page_size = args.batch.page_size;
  p.sliding_window = std::min(args.sliding_window, kWidestWindow);
  p.sm_scale = args.sm_scale;
  p.soft_cap = args.soft_cap;
  p.causal = args.causal;
  p.sinks = args.sinks;
  p.k_scale = args.k_scale;
  p.v_scale = args.v_scale;
  p.tree_mask = args.tree_mask;
  p.tree_words = args.tree_words;
  return p;
}

double GuessNanoseconds(const Problem& p, const Item& item) {
  int64_t keys = item.kv_len;
  if (p.causal) keys = std::min(keys, item.first_position + item.num_tokens);
  if (p.sliding_window > 0) {
    keys = std::min(keys, p.sliding_window + item.num_tokens);
  }
  const double elements =
      2.0 * static_cast<double>(std::max<int64_t>(keys, 0) * p.head_dim);
  const double flops =
      2.0 * elements * static_cast<double>(item.num_tokens * p.group);
  return flops / kFlopsPerNanosecond + elements / kKvElementsPerNanosecond;
}

// Later tokens of a sequence see more keys: a sequence's longest items come
// first.
void AppendItems(const BatchView& batch, int64_t seq, Work& work) {
  const Problem& p = work.problem;
  const int64_t q_len = batch.q_len(seq);
  const int64_t step = std::max<int64_t>(1, kTargetRows / p.group);
  if (q_len <= 0) return;
  for (int64_t first = (q_len - 1) / step * step; first >= 0; first -= step) {
    Item item;
    item.pages = batch.pages(seq);
    item.kv_len = batch.kv_len(seq);
    item.first_new = item.kv_len - q_len;
    item.first_row = batch.q_begin(seq) + first;
    item.first_position = item.first_new + first;
    item.num_tokens = std::min(step, q_len - first);
    for (item.kv_head = 0; item.kv_head < p.num_kv_heads; ++item.kv_head) {
      work.items.push_back(item);
    }
    work.max_rows = std::max(work.max_rows, item.num_tokens * p.group);
    work.nanoseconds +=
        GuessNanoseconds(p, item) * static_cast<double>(p.num_kv_heads);
  }
}

}  // namespace

Work Divide(const RaggedPagedAttentionArgs& args) {
  Work work{.problem = MakeProblem(args), .items = {}};
  for (int64_t seq = 0; seq < args.batch.num_seqs; ++seq) {
    AppendItems(args.batch, seq, work);
  }
  return work;
}

}  // namespace pagemill::attention
