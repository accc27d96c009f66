// The scan for what every machine of the architecture has.
#include <cstdint>

#include "csrc/core/validate/table_scan-inl.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

struct Row {
  template <Lookup kLookup>
  static RowFindings Scan(const int32_t* pages, int64_t count,
                          const TableScan& scan) {
    uint32_t outside = 0;
    int64_t hits = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t page = static_cast<uint32_t>(pages[i]);
      const uint32_t inside =
          page < scan.total_num_pages;  // negatives wrap high
      outside |= inside ^ 1;
      if constexpr (kLookup == Lookup::kMarks) {
        const uint32_t safe = inside != 0 ? page : 0;
        hits += (scan.marks[safe / 32] >> (safe % 32)) & inside;
      }
    }
    return {outside != 0, hits};
  }
};

}  // namespace

bool ScanTablePortable(const TableScan& scan) {
  if (scan.marks == nullptr) return ScanRows<Row, Lookup::kNone>(scan);
  return ScanRows<Row, Lookup::kMarks>(scan);
}

}  // namespace pagemill::internal
