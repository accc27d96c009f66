// The accepting pass over a batch's rows.  It keeps which rows are bad, so
// that only these need be looked at again to say why.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_

#include <cstdint>
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

  // Lengths, a page id, or at level kFull a page that the row reads while it
  // is written, are bad.
  bool row_is_bad(int64_t seq) const {
    return (memory_.flags[seq] & kBadRow) != 0;
  }
  // slot_mapping is bad; never set in a bad row, where it is not looked at.
  bool tokens_are_bad(int64_t seq) const {
    return (memory_.flags[seq] & kBadTokens) != 0;
  }
  // None when the lengths are bad.
  const RowSlots& slots(int64_t seq) const { return memory_.slots[seq]; }

  // At level kFull, pages that were written before by an earlier slot; a page
  // may repeat.
  const std::vector<int32_t>& written_twice() const {
    return memory_.written_twice;
  }
  // The same and what is named out of range excepted, pages in written slots.
  bool is_written(uint32_t page) const { return memory_.marks.Test(page); }

  // Ends the use of is_written, and lends its bits, all 0.
  PageBits& TakeBits();

 private:
  static constexpr uint8_t kBadRow = 1;
  static constexpr uint8_t kBadTokens = 2;

  bool ScanLengths();
  void MarkWritten();
  void ClearWritten();
  bool ScanTokens();
  template <typename Visit>
  void ForWritten(const Visit& visit);

  const BatchView& batch_;
  ScanMemory& memory_;
  int64_t num_written_ = 0;  // slots
  bool marked_ = false;
  bool filtered_ = false;
  bool clean_ = false;
};

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_SCAN_H_
