#include "csrc/core/validate/ownership.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/page_bits.h"
#include "csrc/core/validate/scan.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

// The few pages in question, and who writes each first.
class Contested {
 public:
  // Pages may repeat.  The bits must all be 0, and will be in the end.
  Contested(std::vector<int32_t> pages, PageBits& bits)
      : pages_(std::move(pages)), bits_(bits) {
    std::sort(pages_.begin(), pages_.end());
    pages_.erase(std::unique(pages_.begin(), pages_.end()), pages_.end());
    writers_.assign(pages_.size(), -1);
    for (const int32_t page : pages_) bits_.Set(page);
  }
  ~Contested() {
    for (const int32_t page : pages_) bits_.ClearAround(page);
  }
  Contested(const Contested&) = delete;
  Contested& operator=(const Contested&) = delete;

  // For page ids in range.
  bool Has(int32_t page) const { return bits_.Test(page); }

  // The first writer of a page that it has; -1 before there is one.
  int64_t& writer(int32_t page) {
    const auto place = std::lower_bound(pages_.begin(), pages_.end(), page);
    return writers_[static_cast<size_t>(place - pages_.begin())];
  }

 private:
  std::vector<int32_t> pages_;
  std::vector<int64_t> writers_;
  PageBits& bits_;
};

struct Read {
  int64_t seq;
  int32_t slot;
  int32_t page;
};

// Slots that read a page which is written.
std::vector<Read> ReadsOfWritten(const BatchView& batch, Scan& scan) {
  std::vector<Read> reads;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (!scan.ownership_is_bad(seq)) continue;
    for (const int32_t slot : scan.FindReadsOfWritten(seq)) {
      reads.push_back({seq, slot, batch.pages(seq)[slot]});
    }
  }
  return reads;
}

// Finds the first writers on its way.
void LocateWrittenTwice(const Scan& scan, Contested& contested,
                        std::vector<Violation>& violations) {
  scan.ForEachWritten([&](int64_t seq, int32_t slot, uint32_t id) {
    const int32_t page = static_cast<int32_t>(id);
    if (!contested.Has(page)) return;
    int64_t& writer = contested.writer(page);
    if (writer < 0) {
      writer = seq;
    } else {
      violations.push_back(
          {CheckCode::kPageWrittenTwice, seq, slot, page, writer});
    }
  });
}

}  // namespace

void LocateOwnership(const BatchView& batch, Scan& scan,
                     std::vector<Violation>& violations) {
  const std::vector<Read> reads = ReadsOfWritten(batch, scan);
  std::vector<int32_t> pages = scan.written_twice();
  for (const Read& read : reads) pages.push_back(read.page);
  if (pages.empty()) return;
  Contested contested(std::move(pages), scan.TakeBits());
  LocateWrittenTwice(scan, contested, violations);
  for (const Read& read : reads) {
    violations.push_back({CheckCode::kSharedPageWritten, read.seq, read.slot,
                          read.page, contested.writer(read.page)});
  }
}

}  // namespace pagemill::internal
