// The scan for machines with AVX-512 whose gathers are slow (AMD's Zen 4 takes
// 24 cycles for 16 words): where few pages are written, it looks the others up
// in registers, and what passes there one by one.
// Compiled with -march=x86-64-v4.
#include "csrc/core/validate/table_scan.h"
#include "csrc/core/x86.h"

#if PAGEMILL_X86

#include <immintrin.h>

#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"
#include "csrc/core/validate/table_scan_avx512-inl.h"

namespace pagemill::internal {
namespace {

// As many bits as four registers hold.  With more pages written too many others
// pass the filter.
constexpr TableFilter kRegisterFilter = {
    .bits = 2048, .max_pages_without = 0, .max_written = 1536};

class RegisterFilter {
 public:
  explicit RegisterFilter(const uint32_t* words)
      : words_{_mm512_loadu_si512(words), _mm512_loadu_si512(words + 16),
               _mm512_loadu_si512(words + 32), _mm512_loadu_si512(words + 48)} {
  }

  // Those of `lanes` whose page has its bit set.
  __mmask16 LookUp(__mmask16 lanes, __m512i page) const {
    // A permutation picks modulo 32 words by itself.
    const __m512i word = _mm512_maskz_srli_epi32(kAllLanes, page, 5);
    const __mmask16 high =
        _mm512_test_epi32_mask(page, _mm512_set1_epi32(1024));
    return TestBits(
        lanes,
        _mm512_mask_blend_epi32(
            high, _mm512_permutex2var_epi32(words_[0], word, words_[1]),
            _mm512_permutex2var_epi32(words_[2], word, words_[3])),
        page);
  }

 private:
  __m512i words_[4];
};

// Adds the bit of a page: two instructions, for which compilers take three.
inline void AddMark(uint64_t& hits, const uint32_t* marks, uint32_t page) {
  const uint32_t word = marks[page / 32];
  asm("bt %2, %1\n\tadc $0, %0" : "+r"(hits) : "r"(word), "r"(page) : "cc");
}

// Of pages that are in range.
int64_t CountMarked(const int32_t* pages, int64_t count,
                    const uint32_t* marks) {
  uint64_t even = 0, odd = 0;  // so that additions need not wait for each other
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    AddMark(even, marks, static_cast<uint32_t>(pages[i]));
    AddMark(odd, marks, static_cast<uint32_t>(pages[i + 1]));
  }
  if (i < count) AddMark(even, marks, static_cast<uint32_t>(pages[i]));
  return static_cast<int64_t>(even + odd);
}

constexpr int64_t kRoom = 2048;

// Pages that passed the filter.
struct Passed {
  int64_t count = 0;
  int32_t pages[kRoom + kVectorLanes];

  // Those of up to kRoom - count pages; returns whether one is outside.
  bool Add(const int32_t* from, int64_t num_pages, const TableScan& scan) {
    // Held here, as what is appended could be any object's memory.
    const RegisterFilter filter(scan.filter);
    const uint32_t total_num_pages = scan.total_num_pages;
    int64_t end = count;
    uint32_t outside = 0;
    ForEachVector(from, num_pages, [&](__mmask16 lanes, __m512i page) {
      const __mmask16 inside = Inside(lanes, page, total_num_pages);
      outside |= static_cast<uint32_t>(inside ^ lanes);
      end += Append(filter.LookUp(inside, page), page, pages + end);
    });
    count = end;
    return outside != 0;
  }
};

// Rows that follow each other.  Marks are counted for all of them together: for
// each row alone, a loop over a few pages would wait for the filter, and end as
// nobody can guess.
class RowGroup {
 public:
  // As many from `first` on as there is room for.
  RowGroup(const TableScan& scan, int64_t first) : scan_(scan), first_(first) {
    while (num_rows_ < kRows && first + num_rows_ < scan.num_rows &&
           passed_.count < kEnough) {
      const auto [pages, count] = PagesOf(scan, first + num_rows_);
      if (passed_.count + count > kRoom) break;
      FetchAhead(scan, first + num_rows_);
      outside_[num_rows_] = passed_.Add(pages, count, scan);
      any_outside_ |= outside_[num_rows_];
      ends_[num_rows_++] = passed_.count;
    }
  }

  int64_t num_rows() const { return num_rows_; }

  // Returns all rows' flags.
  uint8_t Report() const { return AreSound() ? uint8_t{0} : ReportEach(); }

  // For rows that are likely to be bad.
  uint8_t ReportEach() const {
    int32_t hits[kRoom + 1];  // of so many that passed
    uint64_t sum = 0;
    for (int64_t i = 0; i < passed_.count; ++i) {
      hits[i] = static_cast<int32_t>(sum);
      AddMark(sum, scan_.marks, static_cast<uint32_t>(passed_.pages[i]));
    }
    hits[passed_.count] = static_cast<int32_t>(sum);
    uint8_t any = 0;
    int32_t before = 0;
    for (int64_t i = 0; i < num_rows_; ++i) {
      const int32_t up_to = hits[ends_[i]];
      any |= internal::Report<Lookup::kFilter>(scan_, first_ + i,
                                               {outside_[i], up_to - before});
      before = up_to;
    }
    return any;
  }

 private:
  static constexpr int64_t kRows = 16;
  static constexpr int64_t kEnough = 512;

  // Sets the rows' hits.
  bool AreSound() const {
    int64_t num_written = 0;
    for (int64_t i = 0; i < num_rows_; ++i) {
      const RowSlots slots = scan_.rows[first_ + i];
      scan_.hits[first_ + i] = slots.end - slots.written;
      num_written += slots.end - slots.written;
    }
    // Written slots name marked pages: no row's hits make up for another's.
    return !any_outside_ && CountMarked(passed_.pages, passed_.count,
                                        scan_.marks) == num_written;
  }

  const TableScan& scan_;
  const int64_t first_;
  int64_t num_rows_ = 0;
  bool any_outside_ = false;
  bool outside_[kRows];
  int64_t ends_[kRows];
  Passed passed_;
};

uint8_t ScanLongRow(const TableScan& scan, int64_t row) {
  const auto [pages, count] = PagesOf(scan, row);
  RowFindings found = {false, 0};
  for (int64_t i = 0; i < count; i += kRoom) {
    Passed passed;
    found.outside |=
        passed.Add(pages + i, count - i < kRoom ? count - i : kRoom, scan);
    found.hits += CountMarked(passed.pages, passed.count, scan.marks);
  }
  return Report<Lookup::kFilter>(scan, row, found);
}

bool ScanFiltered(const TableScan& scan) {
  uint8_t any = 0;
  for (int64_t row = 0; row < scan.num_rows;) {
    const RowGroup group(scan, row);
    if (group.num_rows() == 0) {
      any |= ScanLongRow(scan, row++);
      continue;
    }
    // Bad rows seldom come alone.
    any |= any != 0 ? group.ReportEach() : group.Report();
    row += group.num_rows();
  }
  return any != 0;
}

bool ScanTable(const TableScan& scan) {
  const bool filtered =
      scan.filter != nullptr && scan.filter_bits == kRegisterFilter.bits;
  return filtered ? ScanFiltered(scan) : kAvx512TableScanner.scan(scan);
}

void Find(const TableScan& scan, const int32_t* rows, int64_t num_rows,
          int32_t* slots, int32_t* ends) {
  kAvx512TableScanner.find(scan, rows, num_rows, slots, ends);
}

constexpr TableFilter kFilters[] = {kRegisterFilter, kCacheFilter};

}  // namespace

const TableScanner kAvx512PermuteTableScanner = {.name = "avx512_permute",
                                                 .scan = ScanTable,
                                                 .find = Find,
                                                 .filters = kFilters,
                                                 .num_filters = 2};

}  // namespace pagemill::internal

#endif  // PAGEMILL_X86
