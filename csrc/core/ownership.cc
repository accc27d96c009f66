#include "csrc/core/ownership.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

// Beyond this many pages a byte for each would be too much to keep.
constexpr int64_t kMaxMarks = int64_t{1} << 26;

// A byte per page, all 0 between calls, so that a call clears only what it
// set.
std::vector<uint8_t>& WrittenMarks(int64_t total_num_pages) {
  thread_local std::vector<uint8_t> marks;
  if (static_cast<int64_t>(marks.size()) < total_num_pages) {
    marks.resize(total_num_pages, 0);
  }
  return marks;
}

// Marks written pages; returns how many there are.
int64_t MarkWritten(const BatchView& batch, uint8_t* marks) {
  int64_t written = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const SlotRange slots = Slots(batch, seq);
    const int32_t* pages = batch.pages(seq);
    for (int64_t i = slots.written; i < slots.live; ++i) {
      written += 1 - marks[pages[i]];
      marks[pages[i]] = 1;
    }
  }
  return written;
}

int64_t CountMarked(const BatchView& batch, const uint8_t* marks) {
  int64_t marked = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t live = Slots(batch, seq).live;
    const int32_t* pages = batch.pages(seq);
    for (int64_t i = 0; i < live; ++i) marked += marks[pages[i]];
  }
  return marked;
}

void ClearWritten(const BatchView& batch, uint8_t* marks) {
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const SlotRange slots = Slots(batch, seq);
    const int32_t* pages = batch.pages(seq);
    for (int64_t i = slots.written; i < slots.live; ++i) marks[pages[i]] = 0;
  }
}

bool InRange(const BatchView& batch, int32_t page) {
  return page >= 0 && page < batch.total_num_pages;
}

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

}  // namespace

SlotRange Slots(const BatchView& batch, int64_t seq) {
  const int64_t kv_len = batch.kv_len(seq);
  const int64_t live = (kv_len + batch.page_size - 1) / batch.page_size;
  const int64_t q_len = batch.q_len(seq);
  return {q_len == 0 ? live : (kv_len - q_len) / batch.page_size, live};
}

bool OwnershipHolds(const BatchView& batch) {
  if (batch.total_num_pages > kMaxMarks) {
    std::vector<Violation> violations;
    LocateOwnership(batch, std::vector<bool>(batch.num_seqs, true), violations);
    return violations.empty();
  }
  uint8_t* marks = WrittenMarks(batch.total_num_pages).data();
  const int64_t written = MarkWritten(batch, marks);
  // Each written page is found by the slot that writes it; a slot more that
  // finds one names the page a second time.
  const bool holds = CountMarked(batch, marks) == written;
  ClearWritten(batch, marks);
  return holds;
}

void LocateOwnership(const BatchView& batch, const std::vector<bool>& usable,
                     std::vector<Violation>& violations) {
  std::unordered_map<int32_t, int64_t> writers;  // page to sequence
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (!usable[seq]) continue;
    const SlotRange slots = Slots(batch, seq);
    for (int64_t i = slots.written; i < slots.live; ++i) {
      const int32_t page = batch.pages(seq)[i];
      if (!InRange(batch, page)) continue;
      const auto [writer, first] = writers.emplace(page, seq);
      if (!first) {
        violations.push_back(WrittenTwice(seq, i, page, writer->second));
      }
    }
  }
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    if (!usable[seq]) continue;
    const int64_t read_only = Slots(batch, seq).written;
    for (int64_t i = 0; i < read_only; ++i) {
      const int32_t page = batch.pages(seq)[i];
      const auto writer = writers.find(page);
      if (writer == writers.end()) continue;
      violations.push_back(SharedWritten(seq, i, page, writer->second));
    }
  }
}

}  // namespace pagemill
