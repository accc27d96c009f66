// c = a b, or c = row_scale c + a b, in register tiles.
//
// Each element sums over k in ascending order whatever tile it falls in, so
// its bits depend on its own row of `a` and column of `b` only.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_MATMUL_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_MATMUL_INL_H_

#include <cstdint>

#include "csrc/core/attention/vector-inl.h"

namespace pagemill::attention {
namespace {

// Row-major matrices; the distance between rows in elements.
struct Matrices {
  const float* a;  // [rows, k]
  int64_t a_stride;
  const float* b;  // [k, columns]
  int64_t b_stride;
  float* c;  // [rows, columns]
  int64_t c_stride;
  const float* row_scale;  // [rows]; null: c is only written
};

// As many accumulators as leave registers for a row of b and one of a.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVectors = kNumRegisters >= 32 ? 4 : 2;

template <int kRows, int kVectors, bool kAccumulate>
inline void MultiplyTile(const Matrices& m, int64_t row, int64_t column,
                         int64_t k) {
  const float* a = m.a + row * m.a_stride;
  const float* b = m.b + column;
  float* c = m.c + row * m.c_stride + column;
  Floats sum[kRows][kVectors] = {};
  if constexpr (kAccumulate) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] =
            Load(c + r * m.c_stride + v * kLanes) * m.row_scale[row + r];
      }
    }
  }
  for (int64_t i = 0; i < k; ++i, b += m.b_stride) {
    Floats b_row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) b_row[v] = Load(b + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Floats a_element = Splat(a[r * m.a_stride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[r][v] += a_element * b_row[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Store(sum[r][v], c + r * m.c_stride + v * kLanes);
    }
  }
}

template <int kVectors, bool kAccumulate>
inline void MultiplyPanel(const Matrices& m, int64_t row, int64_t end,
                          int64_t column, int64_t k) {
  for (; row + kTileRows <= end; row += kTileRows) {
    MultiplyTile<kTileRows, kVectors, kAccumulate>(m, row, column, k);
  }
  for (; row + 4 <= end; row += 4) {
    MultiplyTile<4, kVectors, kAccumulate>(m, row, column, k);
  }
  for (; row + 2 <= end; row += 2) {
    MultiplyTile<2, kVectors, kAccumulate>(m, row, column, k);
  }
  if (row < end) MultiplyTile<1, kVectors, kAccumulate>(m, row, column, k);
}

// Rows [begin, end) of c; `columns` is a multiple of kLanes.
template <bool kAccumulate>
void Multiply(const Matrices& m, int64_t begin, int64_t end, int64_t columns,
              int64_t k) {
  int64_t column = 0;
  constexpr int64_t kWide = kTileVectors * kLanes;
  for (; column + kWide <= columns; column += kWide) {
    MultiplyPanel<kTileVectors, kAccumulate>(m, begin, end, column, k);
  }
  for (; column < columns; column += kLanes) {
    MultiplyPanel<1, kAccumulate>(m, begin, end, column, k);
  }
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_MATMUL_INL_H_
