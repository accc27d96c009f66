// One work item: some query tokens of a sequence against one KV head.
//
// The item's rows (its tokens times the head's group) meet the keys block by
// block: pack, score, soften, accumulate.  Keys and values are packed into f32
// scratch once per block, keys transposed, so that both products run in one
// matrix kernel; the softmax is the online one.
//
// Only for the kernel_*.cc files, see vector-inl.h.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_INL_H_

#include <cstdint>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/matmul-inl.h"
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

// Keys that a query at `position` sees.
inline Range VisibleKeys(const Problem& p, int64_t kv_len, int64_t position) {
  Range keys = {0, kv_len};
  if (p.causal) keys.end = Min(keys.end, position + 1);
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
  if (p.causal) begin = Max(begin, keys.begin - item.first_position);
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
  const int64_t slot = page * p.page_size + token % p.page_size;
  const int64_t head = slot * 2 * p.num_kv_heads + 2 * item.kv_head;
  const Element* key =
      static_cast<const Element*>(p.kv_pages) + head * p.head_dim;
  return {key, key + p.head_dim};
}

// Keys of kLanes tokens, transposed into kLanes columns; null: zeros.
template <typename Element>
inline void PackKeys(const Element* const (&keys)[kLanes], int64_t head_dim,
                     float* columns) {
  Floats square[kLanes];
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const int64_t left = head_dim - d;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      square[i] = keys[i] == nullptr ? Floats{}
                  : left >= kLanes   ? Load(keys[i] + d)
                                     : LoadSome(keys[i] + d, left);
    }
    Transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i < left) Store(square[i], columns + (d + i) * kBlockKv);
    }
  }
}

// Packs the block's tokens in `live`; the others of the first `width`, which
// is a multiple of kLanes, become 0 unread.
template <typename Element>
void PackBlock(const Problem& p, const Item& item, int64_t block, Range live,
               int64_t width, const Workspace& w) {
  for (int64_t first = 0; first < width; first += kLanes) {
    const Element* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int64_t token = block + first + i;
      float* value = w.values + (first + i) * w.stride;
      if (token < live.begin || token >= live.end) {
        keys[i] = nullptr;
        Widen<float>(nullptr, 0, value, w.stride);
        continue;
      }
      const TokenKv<Element> kv = Locate<Element>(p, item, token);
      keys[i] = kv.key;
      Widen(kv.value, p.head_dim, value, w.stride);
    }
    PackKeys(keys, p.head_dim, w.keys + first);
  }
}

// True when a value of the block is infinite or NaN.
bool HasNonFinite(const Workspace& w, int64_t width) {
  Ints found = {};
  for (int64_t i = 0; i < width * w.stride; i += kLanes) {
    const Floats x = Load(w.values + i);
    found |= (x - x) != Floats{};
  }
  float lanes[kLanes];
  Store(found != 0 ? Splat(1.0f) : Floats{}, lanes);
  return SumLanes(Load(lanes)) != 0.0f;
}

// ------------------------------------------------------------------ softmax

// Scaled, capped, then masked; returns the largest.
template <bool kMasked>
inline Floats FinishScores(const Problem& p, Range visible, int64_t width,
                           float* scores) {
  Floats largest = Splat(-kInfinity);
  const float inverse_cap = p.soft_cap > 0 ? 1.0f / p.soft_cap : 0.0f;
  for (int64_t i = 0; i < width; i += kLanes) {
    Floats s = Load(scores + i) * p.sm_scale;
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

// One step of the online softmax: scores become weights, `visible` counts
// from the block's first key.
inline void SoftenRow(const Problem& p, Range visible, int64_t width,
                      int64_t row, const Workspace& w) {
  float* scores = w.scores + row * kBlockKv;
  const bool all_seen = visible.begin == 0 && visible.end == width;
  const float block_max =
      MaxLane(all_seen ? FinishScores<false>(p, visible, width, scores)
                       : FinishScores<true>(p, visible, width, scores));
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

// ---------------------------------------------------------------- the stages

template <typename Element>
void LoadQueries(const Problem& p, const Item& item, const Workspace& w) {
  const Element* q = static_cast<const Element*>(p.q);
  const int64_t heads = p.num_kv_heads * p.group;
  for (int64_t row = 0; row < item.num_tokens * p.group; ++row) {
    const int64_t token = item.first_row + row / p.group;
    const int64_t head = item.kv_head * p.group + row % p.group;
    Widen(q + (token * heads + head) * p.head_dim, p.head_dim,
          w.queries + row * w.stride, w.stride);
    Widen<float>(nullptr, 0, w.sums + row * w.stride, w.stride);
    w.max[row] = -kInfinity;
    w.total[row] = 0.0f;
  }
}

void Score(const Problem& p, Range rows, int64_t width, const Workspace& w) {
  const Matrices m = {w.queries, w.stride, w.keys, kBlockKv,
                      w.scores,  kBlockKv, nullptr};
  Multiply<false>(m, rows.begin, rows.end, width, p.head_dim);
}

void Soften(const Problem& p, const Item& item, int64_t block, Range rows,
            int64_t width, const Workspace& w) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t position = item.first_position + row / p.group;
    const Range keys = VisibleKeys(p, item.kv_len, position);
    const Range visible = {Max(keys.begin - block, 0),
                           Min(keys.end - block, width)};
    SoftenRow(p, visible, width, row, w);
  }
}

// As Accumulate, but a weight of 0 leaves out its value even where 0 times
// that would be NaN.
void AccumulateNonFinite(Range rows, int64_t width, const Workspace& w) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    float* sums = w.sums + row * w.stride;
    for (int64_t d = 0; d < w.stride; d += kLanes) {
      Store(Load(sums + d) * w.rescale[row], sums + d);
    }
    for (int64_t i = 0; i < width; ++i) {
      const float weight = w.scores[row * kBlockKv + i];
      if (weight == 0.0f) continue;
      const float* value = w.values + i * w.stride;
      for (int64_t d = 0; d < w.stride; d += kLanes) {
        Store(Load(sums + d) + weight * Load(value + d), sums + d);
      }
    }
  }
}

void Accumulate(Range rows, int64_t width, const Workspace& w) {
  if (HasNonFinite(w, width)) return AccumulateNonFinite(rows, width, w);
  const Matrices m = {w.scores, kBlockKv, w.values, w.stride,
                      w.sums,   w.stride, w.rescale};
  Multiply<true>(m, rows.begin, rows.end, w.stride, width);
}

template <typename Element>
void StoreResults(const Problem& p, const Item& item, const Workspace& w) {
  Element* out = static_cast<Element*>(p.out);
  const int64_t heads = p.num_kv_heads * p.group;
  for (int64_t row = 0; row < item.num_tokens * p.group; ++row) {
    const int64_t token = item.first_row + row / p.group;
    const int64_t head = item.kv_head * p.group + row % p.group;
    Element* to = out + (token * heads + head) * p.head_dim;
    const float* sums = w.sums + row * w.stride;
    const float total = w.total[row];
    // A row that saw no key has a total of 0, and sums of 0.
    const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim; d += kLanes) {
      Store(Load(sums + d) * inverse, to + d);
    }
    if (d < p.head_dim) {
      StoreSome(Load(sums + d) * inverse, to + d, p.head_dim - d);
    }
  }
}

template <typename Element>
void RunItem(const Problem& p, const Item& item, float* scratch) {
  const Workspace w = Carve(scratch, item.num_tokens * p.group, p.head_dim);
  LoadQueries<Element>(p, item, w);
  const Range keys = VisibleKeys(p, item);
  const int64_t first_block = keys.begin / kBlockKv * kBlockKv;
  for (int64_t block = first_block; block < keys.end; block += kBlockKv) {
    const Range live = {Max(keys.begin, block),
                        Min(keys.end, block + kBlockKv)};
    const Range rows = SeeingRows(p, item, live);
    const int64_t width = RoundUp(live.end - block, kLanes);
    PackBlock<Element>(p, item, block, live, width, w);
    Score(p, rows, width, w);
    Soften(p, item, block, rows, width, w);
    Accumulate(rows, width, w);
  }
  StoreResults<Element>(p, item, w);
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_KERNEL_INL_H_
