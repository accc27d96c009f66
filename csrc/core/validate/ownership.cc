#include "csrc/core/validate/ownership.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/page_bits.h"
#include "csrc/core/validate/scan.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

Violation WrittenTwice(int64_t seq, int64_t slot, int32_t page, int64_t other) {
  std::string message =
      other == seq
          ? StrCat("page ", page, " is written through two slots of sequence ",
                   seq, ": page_indices[", seq, ", ", slot, "] repeats it.")
          : StrCat("page ", page, " is written this step by sequence ", other,
                   " and sequence ", seq, ": page_indices[", seq, ", ", slot,
                   "].");
  return {
      CheckCode::kPageWrittenTwice, seq, slot, page, other, std::move(message)};
}

Violation SharedWritten(int64_t seq, int64_t slot, int32_t page,
                        int64_t writer) {
  return {CheckCode::kSharedPageWritten,
          seq,
          slot,
          page,
          writer,
          StrCat("page ", page, " is written this step by sequence ", writer,
                 " while sequence ", seq, " reads it: page_indices[", seq, ", ",
                 slot, "].")};
}

bool InRange(const BatchView& batch, int32_t page) {
  return page >= 0 && page < batch.total_num_pages;
}

// The few pages in question, sorted, and who writes each first.
class Contested {
 public:
  explicit Contested(std::vector<int32_t> pages) : pages_(std::move(pages)) {
    std::sort(pages_.begin(), pages_.end());
    pages_.erase(std::unique(pages_.begin(), pages_.end()), pages_.end());
    writers_.assign(pages_.size(), -1);
  }

  const std::vector<int32_t>& pages() const { return pages_; }

  // The first writer of a page among pages(), -1 before there is one.
  int64_t& writer(int32_t page) {
    const auto place = std::lower_bound(pages_.begin(), pages_.end(), page);
    return writers_[static_cast<size_t>(place - pages_.begin())];
  }

 private:
  std::vector<int32_t> pages_;
  std::vector<int64_t> writers_;
};

// Pages written through two slots, and those that a bad row reads while they
// are written.
std::vector<int32_t> ContestedPages(const BatchView& batch, const Scan& scan) {
  std::vector<int32_t> pages = scan.written_twice();
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (!scan.row_is_bad(seq)) continue;
    const RowSlots& slots = scan.slots(seq);
    for (int32_t i = slots.begin; i < slots.written; ++i) {
      const int32_t page = batch.pages(seq)[i];
      if (InRange(batch, page) && scan.is_written(page)) pages.push_back(page);
    }
  }
  return pages;
}

// Finds the first writers on its way.
void LocateWrittenTwice(const BatchView& batch, const Scan& scan,
                        const PageBits& contested, Contested& writers,
                        std::vector<Violation>& violations) {
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const RowSlots& slots = scan.slots(seq);
    for (int32_t i = slots.written; i < slots.end; ++i) {
      const int32_t page = batch.pages(seq)[i];
      if (!InRange(batch, page) || !contested.Test(page)) continue;
      int64_t& writer = writers.writer(page);
      if (writer < 0) {
        writer = seq;
      } else {
        violations.push_back(WrittenTwice(seq, i, page, writer));
      }
    }
  }
}

void LocateSharedWritten(const BatchView& batch, const Scan& scan,
                         const PageBits& contested, Contested& writers,
                         std::vector<Violation>& violations) {
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (!scan.row_is_bad(seq)) continue;
    const RowSlots& slots = scan.slots(seq);
    for (int32_t i = slots.begin; i < slots.written; ++i) {
      const int32_t page = batch.pages(seq)[i];
      if (!InRange(batch, page) || !contested.Test(page)) continue;
      violations.push_back(SharedWritten(seq, i, page, writers.writer(page)));
    }
  }
}

}  // namespace

void LocateOwnership(const BatchView& batch, Scan& scan,
                     std::vector<Violation>& violations) {
  Contested writers(ContestedPages(batch, scan));
  if (writers.pages().empty()) return;
  // From here on a bit says that a page is contested, not that it is written.
  PageBits& contested = scan.TakeBits();
  for (const int32_t page : writers.pages()) contested.Set(page);
  LocateWrittenTwice(batch, scan, contested, writers, violations);
  LocateSharedWritten(batch, scan, contested, writers, violations);
  for (const int32_t page : writers.pages()) contested.ClearAround(page);
}

}  // namespace pagemill::internal
