// One query token: few rows, which all see the same keys.  Packing would cost
// more than it saves, so keys and values are used where they lie, while the
// next block is fetched.
//
// Stages of a block: score, soften, accumulate.
// Only for the kernel_*.cc files, see vector-inl.h.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_DECODE_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_DECODE_INL_H_

#include <cstdint>

#include "csrc/core/attention/item-inl.h"
#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/vector-inl.h"

namespace pagemill::attention {
namespace {

// Keys of a block's tokens where they lie; values are as far behind as the
// layout says.
template <typename Element>
struct BlockKeys {
  const Element* keys[kBlockKv];
  int64_t count;
};

// Where the keys of tokens [begin, begin + count) are; the last one repeats up
// to a whole vector of tokens, whose scores nobody looks at.
template <typename Element>
inline void LocateKeys(const Problem& p, const Item& item, int64_t begin,
                       int64_t count, BlockKeys<Element>& to) {
  to.count = count;
  int64_t page = begin / p.page_size;
  int64_t slot = begin % p.page_size;
  const Element* head =
      static_cast<const Element*>(p.kv_pages) + item.kv_head * p.kv.head;
  int64_t i = 0;
  for (; i < count; ++page, slot = 0) {
    const Element* first =
        head + item.pages[page] * p.kv.page + slot * p.kv.token;
    const int64_t stop = Min(count, i + p.page_size - slot);
    for (; i < stop; ++i, first += p.kv.token) to.keys[i] = first;
  }
  for (; i < RoundUp(count, kLanes); ++i) to.keys[i] = to.keys[count - 1];
}

template <typename Element>
inline void Prefetch(const Problem& p, const Element* key) {
  constexpr int64_t kPerLine = 64 / static_cast<int64_t>(sizeof(Element));
  for (int64_t i = 0; i < p.head_dim; i += kPerLine) {
    __builtin_prefetch(key + i, 0, 2);
    __builtin_prefetch(key + p.kv.value + i, 0, 2);
  }
}

// Scores of kRows rows with kLanes / kRows tokens.
template <int kRows, typename Element>
inline void ScoreTile(const Problem& p, int64_t row, int64_t token,
                      const Element* const* keys, const Workspace& w) {
  constexpr int kTokens = kLanes / kRows;
  const float* queries = w.queries + row * w.stride;
  Floats sums[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= p.head_dim; d += kLanes) {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const Floats key = Load(keys[token + t] + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r * kTokens + t] += Load(queries + r * w.stride + d) * key;
      }
    }
  }
  if (d < p.head_dim) {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const Floats key = LoadSome(keys[token + t] + d, p.head_dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r * kTokens + t] += Load(queries + r * w.stride + d) * key;
      }
    }
  }
  float scores[kLanes];
  Store(SumEach(sums), scores);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    __builtin_memcpy(w.scores + (row + r) * kBlockKv + token,
                     scores + r * kTokens, kTokens * sizeof(float));
  }
}

// Adds the block's weighted values to kRows rows, kVectors columns at `d`.
// kSome: fewer columns than a vector are left, and kVectors is 1.
template <int kRows, int kVectors, bool kSome, typename Element>
inline void AccumulateTile(const Problem& p, int64_t row, int64_t d,
                           int64_t count, const Element* const* keys,
                           const Workspace& w) {
  Floats sums[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = Load(w.sums + (row + r) * w.stride + d + v * kLanes) *
                   w.rescale[row + r];
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Element* value = keys[i] + p.kv.value + d;
    const float* weights = w.scores + row * kBlockKv + i;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Floats x =
          kSome ? LoadSome(value, p.head_dim - d) : Load(value + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][v] += weights[r * kBlockKv] * x;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Store(sums[r][v], w.sums + (row + r) * w.stride + d + v * kLanes);
    }
  }
}

// Scores of kRows rows with the block; fetches the next block's tokens
// meanwhile, a few at a time, if there are any.
template <int kRows, typename Element>
void ScoreRows(const Problem& p, int64_t row, const BlockKeys<Element>& block,
               const BlockKeys<Element>* next, const Workspace& w) {
  constexpr int kTokens = kLanes / kRows;
  for (int64_t token = 0; token < block.count; token += kTokens) {
    if (next != nullptr) {
      const int64_t end = Min(token + kTokens, next->count);
      for (int64_t i = token; i < end; ++i) Prefetch(p, next->keys[i]);
    }
    ScoreTile<kRows>(p, row, token, block.keys, w);
  }
}

template <int kRows, typename Element>
void AccumulateRows(const Problem& p, int64_t row,
                    const BlockKeys<Element>& block, const Workspace& w) {
  constexpr int kWide = kNumRegisters >= 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + kWide * kLanes <= p.head_dim; d += kWide * kLanes) {
    AccumulateTile<kRows, kWide, false>(p, row, d, block.count, block.keys, w);
  }
  for (; d + kLanes <= p.head_dim; d += kLanes) {
    AccumulateTile<kRows, 1, false>(p, row, d, block.count, block.keys, w);
  }
  if (d < p.head_dim) {
    AccumulateTile<kRows, 1, true>(p, row, d, block.count, block.keys, w);
  }
}

// All rows see all keys of the block: there is one token.  `next` is the block
// to fetch, or null.
template <typename Element>
void DecodeBlock(const Problem& p, const Item& item,
                 const BlockKeys<Element>& block,
                 const BlockKeys<Element>* next, const Workspace& w) {
  int64_t row = 0;
  for (; row + 4 <= p.group; row += 4, next = nullptr) {
    ScoreRows<4>(p, row, block, next, w);
  }
  for (; row + 2 <= p.group; row += 2, next = nullptr) {
    ScoreRows<2>(p, row, block, next, w);
  }
  if (row < p.group) ScoreRows<1>(p, row, block, next, w);

  const int64_t width = RoundUp(block.count, kLanes);
  for (row = 0; row < p.group; ++row) {
    SoftenRow(p, item, 0, {0, block.count}, width, row, w);
  }

  row = 0;
  for (; row + 4 <= p.group; row += 4) AccumulateRows<4>(p, row, block, w);
  for (; row + 2 <= p.group; row += 2) AccumulateRows<2>(p, row, block, w);
  if (row < p.group) AccumulateRows<1>(p, row, block, w);
}

// The part of the sequence's keys in the block that starts at `base`.
template <typename Element>
inline void LocateBlock(const Problem& p, const Item& item, int64_t base,
                        Range seen, BlockKeys<Element>& to) {
  const int64_t begin = Max(seen.begin, base);
  LocateKeys(p, item, begin, Min(seen.end, base + kBlockKv) - begin, to);
}

template <typename Element>
void RunDecode(const Problem& p, const Item& item, float* scratch) {
  const Workspace w = Carve(scratch, p.group, p.head_dim);
  LoadQueries(p, item, w);
  const Range seen = VisibleKeys(p, item);
  BlockKeys<Element> blocks[2];
  int64_t base = seen.begin / kBlockKv * kBlockKv;
  if (base < seen.end) LocateBlock(p, item, base, seen, blocks[0]);
  for (int turn = 0; base < seen.end; base += kBlockKv, turn ^= 1) {
    BlockKeys<Element>* next = nullptr;
    if (base + kBlockKv < seen.end) {
      next = &blocks[turn ^ 1];
      LocateBlock(p, item, base + kBlockKv, seen, *next);
    }
    DecodeBlock(p, item, blocks[turn], next, w);
  }
  StoreResults(p, item, w);
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_DECODE_INL_H_
