// The scan for AVX2: compiled with -mavx2.
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"

namespace pagemill::internal {
namespace {

struct Row {
  template <Lookup kLookup>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    const __m256i last =
        _mm256_set1_epi32(static_cast<int>(scan.total_num_pages - 1));
    const __m256i one = _mm256_set1_epi32(1);
    const __m256i low = _mm256_set1_epi32(31);
    __m256i outside = _mm256_setzero_si256();
    __m256i hits = _mm256_setzero_si256();
    const auto block = [&](__m256i lanes, __m256i page) {
      // Unsigned: negatives wrap high.
      const __m256i inside = _mm256_and_si256(
          lanes, _mm256_cmpeq_epi32(_mm256_min_epu32(page, last), page));
      outside = _mm256_or_si256(outside, _mm256_xor_si256(inside, lanes));
      if constexpr (kLookup == Lookup::kMarks) {
        const __m256i words = _mm256_mask_i32gather_epi32(
            _mm256_setzero_si256(), reinterpret_cast<const int*>(scan.marks),
            _mm256_srli_epi32(page, 5), inside, 4);
        const __m256i bits = _mm256_and_si256(
            _mm256_srlv_epi32(words, _mm256_and_si256(page, low)), one);
        hits = _mm256_add_epi32(hits, bits);
      }
    };
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
      block(_mm256_set1_epi32(-1),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pages + i)));
    }
    if (i < count) {
      const __m256i lanes =
          _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count - i)),
                             _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      block(lanes, _mm256_maskload_epi32(pages + i, lanes));
    }
    return {_mm256_testz_si256(outside, outside) == 0,
            kLookup == Lookup::kMarks ? Sum(hits) : 0};
  }

  static int64_t Sum(__m256i x) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(x),
                                _mm256_extracti128_si256(x, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(sum);
  }
};

}  // namespace

bool ScanTableAvx2(const TableScan& scan) {
  if (scan.marks == nullptr) return ScanRows<Row, Lookup::kNone>(scan);
  return ScanRows<Row, Lookup::kMarks>(scan);
}

}  // namespace pagemill::internal

#endif  // PAGEMILL_X86
