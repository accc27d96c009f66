// The scan for AVX-512: compiled with -march=x86-64-v4.
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"
#include "csrc/core/validate/table_scan_avx512-inl.h"

namespace pagemill::internal {
namespace {

// Rows are filtered piece by piece.
constexpr int64_t kPiece = 256;

// Of pages that are in range.
int64_t CountMarked(const int32_t* pages, int64_t count,
                    const uint32_t* marks) {
  int64_t hits = 0;
  ForEachVector(pages, count, [&](__mmask16 lanes, __m512i page) {
    hits += __builtin_popcount(Gather(lanes, page, marks));
  });
  return hits;
}

struct Row {
  static constexpr int64_t kLanes = kVectorLanes;

  template <Lookup kLookup>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    if constexpr (kLookup != Lookup::kFilter) {
      return ScanSome<kLookup>(pages, count, scan);
    }
    RowFindings all = {false, 0};
    for (int64_t i = 0; i < count; i += kPiece) {
      const int64_t some = count - i < kPiece ? count - i : kPiece;
      const RowFindings found = ScanSome<kLookup>(pages + i, some, scan);
      all.outside |= found.outside;
      all.hits += found.hits;
    }
    return all;
  }

  static uint32_t Outside(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    const __mmask16 lanes = FirstLanes(count);
    const __m512i page = _mm512_maskz_loadu_epi32(lanes, pages);
    return Inside(lanes, page, scan.total_num_pages) ^ uint32_t { lanes };
  }

  static uint32_t Marked(const int32_t* pages, int64_t count,
                         const TableScan& scan) {
    const __mmask16 lanes = FirstLanes(count);
    const __m512i page = _mm512_maskz_loadu_epi32(lanes, pages);
    return Gather(Inside(lanes, page, scan.total_num_pages), page, scan.marks);
  }

 private:
  template <Lookup kLookup>
  static RowFindings ScanSome(const int32_t* pages, int64_t count,
                              const TableScan& scan) {
    const __m512i filter_low = _mm512_set1_epi32(kCacheFilter.bits - 1);
    int32_t passed[kPiece + kVectorLanes];
    int64_t num_passed = 0;
    uint32_t outside = 0;
    int64_t hits = 0;
    ForEachVector(pages, count, [&](__mmask16 lanes, __m512i page) {
      const __mmask16 inside = Inside(lanes, page, scan.total_num_pages);
      outside |= static_cast<uint32_t>(inside ^ lanes);
      if constexpr (kLookup == Lookup::kMarks) {
        hits += __builtin_popcount(Gather(inside, page, scan.marks));
      } else if constexpr (kLookup == Lookup::kFilter) {
        num_passed += Append(
            Gather(inside, _mm512_and_si512(page, filter_low), scan.filter),
            page, passed + num_passed);
      }
    });
    if constexpr (kLookup == Lookup::kFilter) {
      hits = CountMarked(passed, num_passed, scan.marks);
    }
    return {outside != 0, hits};
  }
};

}  // namespace

const TableScanner kAvx512TableScanner = {
    .name = "avx512",
    .scan = ScanTable<Row, Lookup::kFilter>,
    .find = FindSlots<Row>,
    .filters = &kCacheFilter,
    .num_filters = 1};

}  // namespace pagemill::internal

#endif  // PAGEMILL_X86
