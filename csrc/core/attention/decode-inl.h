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

struct TokenBlock {
  int64_t begin;  // first token
  int64_t count;
};

// Where the block's keys are; the last one repeats up to a whole vector of
// tokens, whose scores nobody looks at.
template <typename Element>
inline void LocateKeys(const Problem& p, const Item& item, TokenBlock block,
                       const Element* (&keys)[kBlockKv]) {
  const int64_t token_stride = 2 * p.num_kv_heads * p.head_dim;
  int64_t page = block.begin / p.page_size;
  int64_t slot = block.begin % p.page_size;
  const Element* head =
      static_cast<const Element*>(p.kv_pages) + 2 * item.kv_head * p.head_dim;
  int64_t i = 0;
  for (; i < block.count; ++page, slot = 0) {
    const Element* first =
        head + (item.pages[page] * p.page_size + slot) * token_stride;
    const int64_t stop = Min(block.count, i + p.page_size - slot);
    for (; i < stop; ++i, first += token_stride) keys[i] = first;
  }
  for (; i < RoundUp(block.count, kLanes); ++i) keys[i] = keys[block.count - 1];
}

// A token's key and value lie side by side.
template <typename Element>
inline void Prefetch(const Element* key, int64_t head_dim) {
  const char* line = reinterpret_cast<const char*>(key);
  const int64_t bytes = 2 * head_dim * static_cast<int64_t>(sizeof(Element));
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(line + i, 0, 3);
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
    const Element* value = keys[i] + p.head_dim + d;
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

template <int kRows, typename Element>
void ScoreRows(const Problem& p, int64_t row, int64_t count,
               const Element* const* keys, const Workspace& w) {
  for (int64_t token = 0; token < count; token += kLanes / kRows) {
    ScoreTile<kRows>(p, row, token, keys, w);
  }
}

template <int kRows, typename Element>
void AccumulateRows(const Problem& p, int64_t row, int64_t count,
                    const Element* const* keys, const Workspace& w) {
  constexpr int kWide = kNumRegisters >= 32 ? 4 : 2;
  int64_t d = 0;
  for (; d + kWide * kLanes <= p.head_dim; d += kWide * kLanes) {
    AccumulateTile<kRows, kWide, false>(p, row, d, count, keys, w);
  }
  for (; d + kLanes <= p.head_dim; d += kLanes) {
    AccumulateTile<kRows, 1, false>(p, row, d, count, keys, w);
  }
  if (d < p.head_dim) {
    AccumulateTile<kRows, 1, true>(p, row, d, count, keys, w);
  }
}

// All keys of the block are seen by all rows: there is one token.
template <typename Element>
void DecodeBlock(const Problem& p, int64_t count, const Element* const* keys,
                 const Workspace& w) {
  int64_t row = 0;
  for (; row + 4 <= p.group; row += 4) ScoreRows<4>(p, row, count, keys, w);
  for (; row + 2 <= p.group; row += 2) ScoreRows<2>(p, row, count, keys, w);
  if (row < p.group) ScoreRows<1>(p, row, count, keys, w);

  const int64_t width = RoundUp(count, kLanes);
  for (row = 0; row < p.group; ++row) {
    SoftenRow(p, {0, count}, width, row, w);
  }

  row = 0;
  for (; row + 4 <= p.group; row += 4) {
    AccumulateRows<4>(p, row, count, keys, w);
  }
  for (; row + 2 <= p.group; row += 2) {
    AccumulateRows<2>(p, row, count, keys, w);
  }
  if (row < p.group) AccumulateRows<1>(p, row, count, keys, w);
}

template <typename Element>
void RunDecode(const Problem& p, const Item& item, float* scratch) {
  const Workspace w = Carve(scratch, p.group, p.head_dim);
  LoadQueries<Element>(p, item, w);
  const Range seen = VisibleKeys(p, item);
  const Element* keys[2][kBlockKv];
  const auto block_at = [&seen](int64_t base) {
    const int64_t begin = Max(seen.begin, base);
    return TokenBlock{begin, Min(seen.end, base + kBlockKv) - begin};
  };
  int64_t base = seen.begin / kBlockKv * kBlockKv;
  if (base < seen.end) LocateKeys(p, item, block_at(base), keys[0]);
  for (int turn = 0; base < seen.end; base += kBlockKv, turn ^= 1) {
    if (base + kBlockKv < seen.end) {
      const TokenBlock next = block_at(base + kBlockKv);
      LocateKeys(p, item, next, keys[turn ^ 1]);
      for (int64_t i = 0; i < next.count; ++i) {
        Prefetch(keys[turn ^ 1][i], p.head_dim);
      }
    }
    DecodeBlock<Element>(p, block_at(base).count, keys[turn], w);
  }
  StoreResults<Element>(p, item, w);
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_DECODE_INL_H_
