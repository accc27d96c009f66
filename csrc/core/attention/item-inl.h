// What both ways to compute an item share: its scratch, which keys its rows
// see, where they lie, the online softmax, the way in and the way out.
//
// Only for the kernel_*.cc files, see vector-inl.h.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_ITEM_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_ITEM_INL_H_

#include <cstdint>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/vector-inl.h"

namespace pagemill::attention {
namespace {

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t Max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

struct Range {
  int64_t begin;
  int64_t end;
};

// The f32 matrices of an item, in one piece of scratch.
struct Workspace {
  int64_t stride;  // of rows over head_dim
  float* queries;  // [rows, stride]
  float* sums;     // [rows, stride]
  float* scores;   // [rows, kBlockKv]
  float* keys;     // [head_dim, kBlockKv]
  float* values;   // [kBlockKv, stride]
  float* max;      // [rows]
  float* total;    // [rows]
  float* rescale;  // [rows]
};

Workspace Carve(float* scratch, int64_t rows, int64_t head_dim) {
  Workspace w;
  w.stride = RoundUp(head_dim, kMaxLanes);
  const int64_t padded_rows = RoundUp(rows, kMaxLanes);
  const auto take = [&scratch](int64_t floats) {
    float* piece = scratch;
    scratch += floats;
    return piece;
  };
  w.queries = take(padded_rows * w.stride);
  w.sums = take(padded_rows * w.stride);
  w.scores = take(padded_rows * kBlockKv);
  w.keys = take(w.stride * kBlockKv);
  w.values = take(kBlockKv * w.stride);
  w.max = take(padded_rows);
  w.total = take(padded_rows);
  w.rescale = take(padded_rows);
  return w;
}

// to[0, stride) = from[0, n), then zeros.
template <typename Element>
inline void Widen(const Element* from, int64_t n, float* to, int64_t stride) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(Load(from + i), to + i);
  if (i < n) {
    Store(LoadSome(from + i, n - i), to + i);
    i += kLanes;
  }
  for (; i < stride; i += kLanes) Store(Floats{}, to + i);
}

// ------------------------------------------------------------- what is seen

// With a tree the mask says which of the step's own tokens are seen.
inline bool EndsAtQuery(const Problem& p) {
  return p.causal && p.tree_mask == nullptr;
}

// Keys that a query at `position` sees, but for a tree.
inline Range VisibleKeys(const Problem& p, int64_t kv_len, int64_t position) {
  Range keys = {0, kv_len};
  if (EndsAtQuery(p)) keys.end = Min(keys.end, position + 1);
  if (p.sliding_window > 0) {
    keys.begin = Max(keys.begin, position - p.sliding_window + 1);
  }
  return keys;
}

// Keys that any of the item's rows sees: positions only ascend.
inline Range VisibleKeys(const Problem& p, const Item& item) {
  const int64_t last = item.first_position + item.num_tokens - 1;
  return {VisibleKeys(p, item.kv_len, item.first_position).begin,
          VisibleKeys(p, item.kv_len, last).end};
}

// The item's rows that see a key of [keys.begin, keys.end).
inline Range SeeingRows(const Problem& p, const Item& item, Range keys) {
  int64_t begin = 0;
  int64_t end = item.num_tokens;
  if (EndsAtQuery(p)) begin = Max(begin, keys.begin - item.first_position);
  if (p.sliding_window > 0) {
    end = Min(end, keys.end - 1 + p.sliding_window - item.first_position);
  }
  return {begin * p.group, end * p.group};
}

// ------------------------------------------------------------------ packing

template <typename Element>
struct TokenKv {
  const Element* key;
  const Element* value;
};

// Where a token's key and value are; reads its page's live slot only.
template <typename Element>
inline TokenKv<Element> Locate(const Problem& p, const Item& item,
                               int64_t token) {
  const int64_t page = item.pages[token / p.page_size];
  const Element* key = static_cast<const Element*>(p.kv_pages) +
                       page * p.kv.page + token % p.page_size * p.kv.token +
                       item.kv_head * p.kv.head;
  return {key, key + p.kv.value};
}

// ------------------------------------------------------------------ softmax

// The factor on the product of a query with a stored key.
inline float LogitScale(const Problem& p, const Item& item) {
  return p.k_scale == nullptr ? p.sm_scale
                              : p.sm_scale * p.k_scale[item.kv_head];
}

// Scaled, capped, then masked; returns the largest.
template <bool kMasked>
inline Floats FinishScores(const Problem& p, float scale, Range visible,
                           int64_t width, float* scores) {
  Floats largest = Splat(-kInfinity);
  const float inverse_cap = p.soft_cap > 0 ? 1.0f / p.soft_cap : 0.0f;
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats s = Load(scores + i) * scale;
    if (p.soft_cap > 0) s = Tanh(s * inverse_cap) * p.soft_cap;
    if constexpr (kMasked) {
      const Ints key = Iota() + SplatInt(static_cast<int32_t>(i));
      const Ints seen = (key >= SplatInt(static_cast<int32_t>(visible.begin))) &
                        (key < SplatInt(static_cast<int32_t>(visible.end)));
      s = seen ? s : Splat(-kInfinity);
    }
    Store(s, scores + i);
    largest = Max(s, largest);
  }
  return largest;
}

// Masks what the tree hides from a row, among the step's own keys; finished
// scores count from key `block`.  Returns the largest that is left.
inline float HideByTree(const Problem& p, const Item& item, int64_t block,
                        Range visible, int64_t row, float* scores) {
  const uint32_t* words =
      p.tree_mask + (item.first_row + row / p.group) * p.tree_words;
  float largest = -kInfinity;
  for (int64_t i = visible.begin; i < visible.end; ++i) {
    const int64_t bit = block + i - item.first_new;
    if (bit >= 0 && (bit >= 32 * p.tree_words ||
                     (words[bit / 32] >> (bit % 32) & 1) == 0)) {
      scores[i] = -kInfinity;
    }
    largest = scores[i] > largest ? scores[i] : largest;
  }
  return largest;
}

// One step of the online softmax: scores become weights, `visible` counts
// from the block's first key.
inline void SoftenRow(const Problem& p, const Item& item, int64_t block,
                      Range visible, int64_t width, int64_t row,
                      const Workspace& w) {
  float* scores = w.scores + row * kBlockKv;
  const float scale = LogitScale(p, item);
  const bool all_seen = visible.begin == 0 && visible.end == width;
  float block_max =
      MaxLane(all_seen ? FinishScores<false>(p, scale, visible, width, scores)
                       : FinishScores<true>(p, scale, visible, width, scores));
  if (p.tree_mask != nullptr && block + width > item.first_new) {
    block_max = HideByTree(p, item, block, visible, row, scores);
  }
  const float old_max = w.max[row];
  const float new_max = block_max > old_max ? block_max : old_max;
  // -inf - -inf would be NaN; with nothing finite so far any base will do.
  const float base = new_max == -kInfinity ? 0.0f : new_max;
  Floats total = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Floats weight = ExpOfNonPositive(Load(scores + i) - base);
    Store(weight, scores + i);
    total += weight;
  }
  const float rescale = ExpOfNonPositive(old_max - base);
  w.max[row] = new_max;
  w.rescale[row] = rescale;
  w.total[row] = w.total[row] * rescale + SumLanes(total);
}

// -------------------------------------------------------- entering and leaving

template <typename Element>
void LoadQueries(const Problem& p, const Item& item, const Element* q,
                 const Workspace& w) {
  const int64_t heads = p.num_kv_heads * p.group;
  for (int64_t row = 0; row < item.num_tokens * p.group; ++row) {
    const int64_t token = item.first_row + row / p.group;
    const int64_t head = item.kv_head * p.group + row % p.group;
    Widen(q + (token * heads + head) * p.head_dim, p.head_dim,
          w.queries + row * w.stride, w.stride);
    Widen<float>(nullptr, 0, w.sums + row * w.stride, w.stride);
    // A sink is a key that was seen before all others and has no value.
    w.max[row] = p.sinks == nullptr ? -kInfinity : p.sinks[head];
    w.total[row] = p.sinks == nullptr ? 0.0f : 1.0f;
  }
}

inline void LoadQueries(const Problem& p, const Item& item,
                        const Workspace& w) {
  if (p.narrow) {
    LoadQueries(p, item, static_cast<const BFloat16*>(p.q), w);
  } else {
    LoadQueries(p, item, static_cast<const float*>(p.q), w);
  }
}

template <typename Element>
void StoreResults(const Problem& p, const Item& item, const Workspace& w,
                  Element* out) {
  const int64_t heads = p.num_kv_heads * p.group;
  const float v_scale = p.v_scale == nullptr ? 1.0f : p.v_scale[item.kv_head];
  for (int64_t row = 0; row < item.num_tokens * p.group; ++row) {
    const int64_t token = item.first_row + row / p.group;
    const int64_t head = item.kv_head * p.group + row % p.group;
    Element* to = out + (token * heads + head) * p.head_dim;
    const float* sums = w.sums + row * w.stride;
    const float total = w.total[row];
    // A row that saw no key has a total of 0, and sums of 0.
    const float inverse = total == 0.0f ? 0.0f : v_scale / total;
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim; d += kLanes) {
      Store(Load(sums + d) * inverse, to + d);
    }
    if (d < p.head_dim) {
      StoreSome(Load(sums + d) * inverse, to + d, p.head_dim - d);
    }
    if (p.lse != nullptr) {
      p.lse[token * heads + head] =
          total == 0.0f ? -kInfinity : w.max[row] + __builtin_logf(total);
    }
  }
}

inline void StoreResults(const Problem& p, const Item& item,
                         const Workspace& w) {
  if (p.narrow) {
    StoreResults(p, item, w, static_cast<BFloat16*>(p.out));
  } else {
    StoreResults(p, item, w, static_cast<float*>(p.out));
  }
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_ITEM_INL_H_
