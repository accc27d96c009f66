// The accepting pass over a batch's rows.  It keeps which rows are bad, so
// that only these need be looked at again to say why.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/isa.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/page_bits.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {

// The memory of a scan, kept between a thread's calls.
struct ScanMemory {
  std::vector<RowSlots> slots;
  std::vector<uint8_t> flags;
  std::vector<int32_t> written_twice;
  std::vector<int32_t> found;  // slots of a row
  PageBits marks;
  PageBits filter;
};

// One at a time in a thread.
class Scan {
 public:
  // The batch's sizes must hold; it must outlive the scan.
  Scan(const BatchView& batch, Level level, Isa isa);
  ~Scan();
  Scan(const Scan&) = delete;
  Scan& operator=(const Scan&) = delete;

  // All rows are sound, and so are their tokens' slots.
  bool clean() const { return clean_; }

  bool lengths_are_bad(int64_t seq) const { return Has(seq, kBadLengths); }
  // A live page id is out of range.
  bool has_page_outside(int64_t seq) const { return Has(seq, kPageOutside); }
  // The row may read a page that is written; never set at level kStructure.
  bool ownership_is_bad(int64_t seq) const { return Has(seq, kBadOwnership); }
  // Never set in a row whose lengths or pages are bad.
  bool tokens_are_bad(int64_t seq) const { return Has(seq, kBadTokens); }
  bool is_sound(int64_t seq) const {
    return !Has(seq, kBadLengths | kPageOutside);
  }
  // None when the lengths are bad.
  const RowSlots& slots(int64_t seq) const { return memory_.slots[seq]; }

  // At level kFull, the pages of written slots that an earlier slot writes.
  const std::vector<int32_t>& written_twice() const {
    return memory_.written_twice;
  }

  // Calls visit(seq, slot, page) for each written slot of a page in range.
  template <typename Visit>
  void ForEachWritten(const Visit& visit) const;

  // The row's live slots with a page out of range, and those that it reads but
  // another slot writes (level kFull).  Good until the next such call.
  std::span<const int32_t> FindPagesOutside(int64_t seq);
  std::span<const int32_t> FindReadsOfWritten(int64_t seq);

  // A bit for each page, all 0; FindReadsOfWritten must not be used from here
  // on.
  PageBits& TakeBits();

 private:
  bool Has(int64_t seq, uint8_t flags) const {
    return (memory_.flags[seq] & flags) != 0;
  }
  TableScan Table(const uint32_t* marks);
  bool ScanLengths();
  void MarkWritten();
  void ClearWritten();
  bool ScanTokens();
  // Rows whose written page is fetched ahead; each lies in a line of its own.
  static constexpr int64_t kRowsAhead = 16;

  const BatchView& batch_;
  const TableScanner& scanner_;
  ScanMemory& memory_;
  int64_t num_written_ = 0;  // slots
  bool marked_ = false;
  bool filtered_ = false;
  bool clean_ = false;
};

template <typename Visit>
void Scan::ForEachWritten(const Visit& visit) const {
  const uint32_t total = static_cast<uint32_t>(batch_.total_num_pages);
  for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
    if (seq + kRowsAhead < batch_.num_seqs) {
      __builtin_prefetch(batch_.pages(seq + kRowsAhead) +
                         slots(seq + kRowsAhead).written);
    }
    const RowSlots row = slots(seq);
    const int32_t* pages = batch_.pages(seq);
    for (int32_t slot = row.written; slot < row.end; ++slot) {
      const uint32_t page = static_cast<uint32_t>(pages[slot]);
      if (page < total) visit(seq, slot, page);
    }
  }
}

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_
