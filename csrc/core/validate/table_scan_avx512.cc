// The scan for AVX-512: compiled with -march=x86-64-v4.
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"

namespace pagemill::internal {
namespace {

struct Row {
  template <bool kMarks>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          uint32_t total_num_pages, const uint32_t* marks) {
    const __m512i limit = _mm512_set1_epi32(static_cast<int>(total_num_pages));
    const __m512i one = _mm512_set1_epi32(1);
    uint32_t outside = 0;
    int64_t hits = 0;
    const auto block = [&](__mmask16 lanes, __m512i page) {
      // Unsigned: negatives wrap high.
      const __mmask16 inside = _mm512_mask_cmplt_epu32_mask(lanes, page, limit);
      outside |= static_cast<uint32_t>(inside ^ lanes);
      if constexpr (kMarks) {
        const __m512i words = _mm512_mask_i32gather_epi32(
            _mm512_setzero_si512(), inside,
            _mm512_maskz_srli_epi32(inside, page, 5), marks, 4);
        // A rotation counts modulo 32 by itself.
        const __mmask16 marked = _mm512_test_epi32_mask(
            words, _mm512_maskz_rolv_epi32(inside, one, page));
        hits += __builtin_popcount(marked);
      }
    };
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      block(0xffff, _mm512_loadu_si512(pages + i));
    }
    if (i < count) {
      const __mmask16 lanes = static_cast<__mmask16>((1u << (count - i)) - 1);
      block(lanes, _mm512_maskz_loadu_epi32(lanes, pages + i));
    }
    return {outside != 0, hits};
  }
};

}  // namespace

bool ScanTableAvx512(const TableScan& scan) { return ScanTableWith<Row>(scan); }

}  // namespace pagemill::internal

#endif  // PAGEMILL_X86
