#include "csrc/core/validate/ownership.h"

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/validate.h"
#include "csrc/core/validate/page_bits.h"
#include "csrc/core/validate/scan.h"

namespace pagemill::internal {
namespace {

// Who writes each page first; pages are not negative.
class FirstWriters {
 public:
  explicit FirstWriters(size_t max_pages)
      : entries_(std::bit_ceil(max_pages + max_pages / 2 + 1)),
        shift_(64 - std::countr_zero(entries_.size())) {}

  // The writer of a page; -1 where it was not asked for before.
  int64_t& operator[](int32_t page) {
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
    size_t place = static_cast<uint64_t>(page) * kGolden >> shift_;
    while (entries_[place].page >= 0 && entries_[place].page != page) {
      place = (place + 1) & (entries_.size() - 1);
    }
    entries_[place].page = page;
    return entries_[place].writer;
  }

 private:
  struct Entry {
    int32_t page = -1;
    int64_t writer = -1;
  };
  std::vector<Entry> entries_;  // by hash, then the next free; never full
  int shift_;                   // of a product's bits to a place
};

}  // namespace

void LocateOwnership(Scan& scan, std::vector<Violation>& violations,
                     std::span<const size_t> reads) {
  const size_t contested = reads.size() + scan.written_twice().size();
  if (contested == 0) return;
  // Of the written pages those without a mark are in question.
  PageBits& marks = scan.marks();
  for (const size_t place : reads) {
    marks.Clear(static_cast<uint32_t>(violations[place].value));
  }
  for (const int32_t page : scan.written_twice()) {
    marks.Clear(static_cast<uint32_t>(page));
  }
  FirstWriters writers(contested);
  for (const auto& [seq, slot, page] : scan.written()) {
    if (marks.Test(static_cast<uint32_t>(page))) continue;
    int64_t& writer = writers[page];
    if (writer < 0) {
      writer = seq;
    } else {
      violations.emplace_back(CheckCode::kPageWrittenTwice, seq, slot, page,
                              writer);
    }
  }
  for (const size_t place : reads) {
    Violation& read = violations[place];
    read.limit = writers[static_cast<int32_t>(read.value)];
  }
}

}  // namespace pagemill::internal
