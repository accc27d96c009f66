// The scan for AVX-512: compiled with -march=x86-64-v4.
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"

namespace pagemill::internal {
namespace {

constexpr int64_t kVectorLanes = 16;

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

// Those of `lanes` whose page has its bit set.
inline __mmask16 LookUp(__mmask16 lanes, __m512i page, const uint32_t* bits) {
  const __m512i words = _mm512_mask_i32gather_epi32(
      _mm512_setzero_si512(), lanes, _mm512_maskz_srli_epi32(lanes, page, 5),
      bits, 4);
  // A rotation counts modulo 32 by itself.
  return _mm512_test_epi32_mask(
      words,
      _mm512_maskz_rolv_epi32(lanes, _mm512_maskz_set1_epi32(lanes, 1), page));
}

// Pages that passed the filter, whose marks are looked up together.
class Candidates {
 public:
  static constexpr int64_t kCapacity = 256;

  void Add(__mmask16 lanes, __m512i page) {
    _mm512_storeu_si512(pages_ + count_,
                        _mm512_maskz_compress_epi32(lanes, page));
    count_ += __builtin_popcount(lanes);
  }

  int64_t CountMarked(const uint32_t* marks) const {
    int64_t hits = 0;
    for (int64_t i = 0; i < count_; i += kVectorLanes) {
      const __mmask16 lanes =
          FirstLanes(count_ - i < kVectorLanes ? count_ - i : kVectorLanes);
      hits += __builtin_popcount(
          LookUp(lanes, _mm512_maskz_loadu_epi32(lanes, pages_ + i), marks));
    }
    return hits;
  }

 private:
  uint32_t pages_[kCapacity + kVectorLanes];
  int64_t count_ = 0;
};

struct Row {
  static constexpr int64_t kLanes = kVectorLanes;

  template <Lookup kLookup>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    if constexpr (kLookup != Lookup::kFilter) {
      return ScanSome<kLookup>(pages, count, scan);
    }
    RowFindings all = {false, 0};
    for (int64_t i = 0; i < count; i += Candidates::kCapacity) {
      const int64_t some =
          count - i < Candidates::kCapacity ? count - i : Candidates::kCapacity;
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
    return LookUp(Inside(lanes, page, scan.total_num_pages), page, scan.marks);
  }

 private:
  template <Lookup kLookup>
  static RowFindings ScanSome(const int32_t* pages, int64_t count,
                              const TableScan& scan) {
    const __m512i filter_low = _mm512_set1_epi32(kFilterBits - 1);
    Candidates candidates;
    uint32_t outside = 0;
    int64_t hits = 0;
    const auto block = [&](__mmask16 lanes, __m512i page) {
      const __mmask16 inside = Inside(lanes, page, scan.total_num_pages);
      outside |= static_cast<uint32_t>(inside ^ lanes);
      if constexpr (kLookup == Lookup::kMarks) {
        hits += __builtin_popcount(LookUp(inside, page, scan.marks));
      } else if constexpr (kLookup == Lookup::kFilter) {
        candidates.Add(
            LookUp(inside, _mm512_and_si512(page, filter_low), scan.filter),
            page);
      }
    };
    int64_t i = 0;
    for (; i + kVectorLanes <= count; i += kVectorLanes) {
      block(0xffff, _mm512_loadu_si512(pages + i));
    }
    if (i < count) {
      const __mmask16 lanes = FirstLanes(count - i);
      block(lanes, _mm512_maskz_loadu_epi32(lanes, pages + i));
    }
    if constexpr (kLookup == Lookup::kFilter) {
      hits = candidates.CountMarked(scan.marks);
    }
    return {outside != 0, hits};
  }
};

bool ScanTable(const TableScan& scan) {
  if (scan.marks == nullptr) return ScanRows<Row, Lookup::kNone>(scan);
  return scan.filter == nullptr ? ScanRows<Row, Lookup::kMarks>(scan)
                                : ScanRows<Row, Lookup::kFilter>(scan);
}

}  // namespace

const TableScanner kAvx512TableScanner = {ScanTable, FindSlots<Row>};

}  // namespace pagemill::internal

#endif  // PAGEMILL_X86
