// The scan for AVX2: compiled with -mavx2.
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"

namespace pagemill::internal {
namespace {

// Lanes of page ids; a lane is all ones for true.
struct Lanes {
  __m256i valid;
  __m256i page;
};

Lanes LoadAll(const int32_t* pages) {
  return {_mm256_set1_epi32(-1),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pages))};
}

Lanes LoadSome(const int32_t* pages, int64_t count) {
  const __m256i valid =
      _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)),
                         _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return {valid, _mm256_maskload_epi32(pages, valid)};
}

__m256i Inside(const Lanes& lanes, uint32_t total_num_pages) {
  const __m256i last = _mm256_set1_epi32(static_cast<int>(total_num_pages - 1));
  // Unsigned: negatives wrap high.
  return _mm256_and_si256(
      lanes.valid,
      _mm256_cmpeq_epi32(_mm256_min_epu32(lanes.page, last), lanes.page));
}

// 1 in lanes that are inside and marked, else 0.
__m256i LookUp(__m256i inside, __m256i page, const uint32_t* marks) {
  const __m256i words = _mm256_mask_i32gather_epi32(
      _mm256_setzero_si256(), reinterpret_cast<const int*>(marks),
      _mm256_srli_epi32(page, 5), inside, 4);
  const __m256i bit = _mm256_and_si256(page, _mm256_set1_epi32(31));
  return _mm256_and_si256(_mm256_srlv_epi32(words, bit), _mm256_set1_epi32(1));
}

int64_t Sum(__m256i x) {
  __m128i sum =
      _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
  return _mm_cvtsi128_si32(sum);
}

// A bit per lane: its sign.
uint32_t Bits(__m256i lanes) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}

struct Row {
  static constexpr int64_t kLanes = 8;

  template <Lookup kLookup>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    __m256i outside = _mm256_setzero_si256();
    __m256i hits = _mm256_setzero_si256();
    const auto block = [&](const Lanes& lanes) {
      const __m256i inside = Inside(lanes, scan.total_num_pages);
      outside = _mm256_or_si256(outside, _mm256_xor_si256(inside, lanes.valid));
      if constexpr (kLookup == Lookup::kMarks) {
        hits = _mm256_add_epi32(hits, LookUp(inside, lanes.page, scan.marks));
      }
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) block(LoadAll(pages + i));
    if (i < count) block(LoadSome(pages + i, count - i));
    return {_mm256_testz_si256(outside, outside) == 0,
            kLookup == Lookup::kMarks ? Sum(hits) : 0};
  }

  static uint32_t Outside(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    const Lanes lanes = LoadSome(pages, count);
    const __m256i inside = Inside(lanes, scan.total_num_pages);
    return Bits(_mm256_xor_si256(inside, lanes.valid));
  }

  static uint32_t Marked(const int32_t* pages, int64_t count,
                         const TableScan& scan) {
    const Lanes lanes = LoadSome(pages, count);
    const __m256i inside = Inside(lanes, scan.total_num_pages);
    return Bits(_mm256_slli_epi32(LookUp(inside, lanes.page, scan.marks), 31));
  }
};

}  // namespace

const TableScanner kAvx2TableScanner = {.name = "avx2",
                                        .scan = ScanTable<Row, Lookup::kMarks>,
                                        .find = FindSlots<Row>,
                                        .filters = nullptr,
                                        .num_filters = 0};

}  // namespace pagemill::internal

#endif  // PAGEMILL_X86
