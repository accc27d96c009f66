// Many rows: keys and values of a block are packed into f32 scratch once, keys
// transposed, so that both products run in one matrix kernel.
//
// Stages of a block: pack, score, soften, accumulate.
// Only for the kernel_*.cc files, see vector-inl.h.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_PREFILL_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_PREFILL_INL_H_

#include <cstdint>

#include "csrc/core/attention/item-inl.h"
#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/matmul-inl.h"
#include "csrc/core/attention/vector-inl.h"

namespace pagemill::attention {
namespace {

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
    SoftenRow(p, item, block, visible, width, row, w);
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
void RunPrefill(const Problem& p, const Item& item, float* scratch) {
  const Workspace w = Carve(scratch, item.num_tokens * p.group, p.head_dim);
  LoadQueries(p, item, w);
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
  StoreResults(p, item, w);
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_PREFILL_INL_H_
