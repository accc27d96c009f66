// The accepting pass over a batch's rows.  It keeps which rows are bad, so
// that only these need be looked at again to say why.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/page_bits.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {

// A slot that receives this step's tokens, of a page in range.
struct WrittenSlot {
  int32_t seq;
  int32_t slot;
  int32_t page;
};

// The memory of a scan, kept between a thread's calls.
struct ScanMemory {
  std::vector<RowSlots> slots;
  std::vector<uint8_t> flags;
  std::vector<int32_t> hits;
  std::vector<WrittenSlot> written;
  std::vector<int32_t> written_twice;
  std::vector<int32_t> bad_rows;
  std::vector<int32_t> found;  // slots of a few rows
  std::vector<int32_t> ends;   // of each row's part of them
  PageBits marks;
  std::vector<uint32_t> filter;
};

// One at a time in a thread.
class Scan {
 public:
  // The batch's sizes must hold; it must outlive the scan.
  Scan(const BatchView& batch, Level level, const TableScanner& scanner);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;

  // All rows are sound, and so are their tokens' slots.
  bool clean() const { return clean_; }

  bool lengths_are_bad(int64_t seq) const { return Has(seq, kBadLengths); }
  // Never set in a row whose lengths or pages are bad.
  bool tokens_are_bad(int64_t seq) const { return Has(seq, kBadTokens); }
  bool is_sound(int64_t seq) const {
    return !Has(seq, kBadLengths | kPageOutside);
  }

  // The slots written, in order, and the pages of those that an earlier slot
  // writes; none at level kStructure.
  std::span<const WrittenSlot> written() const { return written_; }
  const std::vector<int32_t>& written_twice() const {
    return memory_.written_twice;
  }

  // Calls visit(seq, slots) for each row with bad lengths or slots, in order;
  // `slots` are the live ones, in order, whose page is out of range or (level
  // kFull) read while it is written this step: none if lengths are bad.
  template <typename Visit>
  void ForEachBadRow(const Visit& visit);

  // The marks of pages that are written; level kFull.  Cleared ones need not be
  // set again, but are not found anymore.
  PageBits& marks() { return memory_.marks; }

 private:
  bool Has(int64_t seq, uint8_t flags) const {
    return (memory_.flags[seq] & flags) != 0;
  }
  std::span<const int32_t> BadRows();
  // How many bad rows are looked at together.
  size_t RowsAtOnce() const;
  // Keeps what ForEachBadRow says of so many rows, or fewer.
  void FindSlots(std::span<const int32_t> rows);
  TableScan Table(const uint32_t* marks);
  bool ScanLengths();
  void ChooseFilter();
  void MarkWritten();
  void ClearWritten();
  bool ScanTokens();

  const BatchView& batch_;
  const TableScanner& scanner_;
  ScanMemory& memory_;
  int64_t num_written_ = 0;  // slots, whatever their pages
  std::span<const WrittenSlot> written_;
  bool marked_ = false;
  uint32_t filter_bits_ = 0;  // none
  bool clean_ = false;
};

template <typename Visit>
void Scan::ForEachBadRow(const Visit& visit) {
  std::span<const int32_t> rows = BadRows();
  while (!rows.empty()) {
    const auto some = rows.first(std::min(rows.size(), RowsAtOnce()));
    FindSlots(some);
    const int32_t* begin = memory_.found.data();
    const int32_t* slots = begin;
    for (size_t i = 0; i < some.size(); ++i) {
      const int32_t* end = begin + memory_.ends[i];
      visit(int64_t{some[i]}, std::span(slots, end));
      slots = end;
    }
    rows = rows.subspan(some.size());
  }
}

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_
