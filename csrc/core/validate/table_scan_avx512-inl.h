// What the AVX-512 scans share.
//
// Only for them: everything has internal linkage.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_AVX512_INL_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_AVX512_INL_H_

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

constexpr int64_t kVectorLanes = 16;

// Marks of up to 2^18 pages fit the first cache; this filter leaves room in it
// for the table.
constexpr TableFilter kCacheFilter = {.bits = uint32_t{1} << 17,
                                      .max_pages_without = int64_t{1} << 18,
                                      .max_written = 1 << 14};

// With a mask that says nothing: where it is not given, an older compiler warns
// of a value not set.
constexpr __mmask16 kAllLanes = 0xffff;

inline __mmask16 FirstLanes(int64_t count) {
  return static_cast<__mmask16>((1u << count) - 1);
}

// Those of `lanes` whose page is in range.
inline __mmask16 Inside(__mmask16 lanes, __m512i page,
                        uint32_t total_num_pages) {
  // Unsigned: negatives wrap high.
  return _mm512_mask_cmplt_epu32_mask(
      lanes, page, _mm512_set1_epi32(static_cast<int>(total_num_pages)));
}

// Those of `lanes` whose word has the bit that a page number modulo 32 names.
inline __mmask16 TestBits(__mmask16 lanes, __m512i words, __m512i page) {
  // A rotation counts modulo 32 by itself.
  const __m512i bit =
      _mm512_maskz_rolv_epi32(kAllLanes, _mm512_set1_epi32(1), page);
  return _mm512_mask_test_epi32_mask(lanes, words, bit);
}

// Those of `lanes` whose page has its bit set.
inline __mmask16 Gather(__mmask16 lanes, __m512i page, const uint32_t* bits) {
  const __m512i words = _mm512_mask_i32gather_epi32(
      _mm512_setzero_si512(), lanes,
      _mm512_maskz_srli_epi32(kAllLanes, page, 5), bits, 4);
  return TestBits(lanes, words, page);
}

// Calls block(lanes, page) for each vector of pages, the last one masked.
template <typename Block>
inline void ForEachVector(const int32_t* pages, int64_t count,
                          const Block& block) {
  int64_t i = 0;
  for (; i + kVectorLanes <= count; i += kVectorLanes) {
    block(kAllLanes, _mm512_loadu_si512(pages + i));
  }
  if (i < count) {
    const __mmask16 lanes = FirstLanes(count - i);
    block(lanes, _mm512_maskz_loadu_epi32(lanes, pages + i));
  }
}

// Writes the pages of `lanes`, and what it likes behind them up to a whole
// vector; returns how many they are.
inline int64_t Append(__mmask16 lanes, __m512i page, int32_t* to) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(lanes, page));
  return __builtin_popcount(lanes);
}

}  // namespace
}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_TABLE_SCAN_AVX512_INL_H_
