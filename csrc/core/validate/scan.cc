#include "csrc/core/validate/scan.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/validate.h"
#include "csrc/core/validate/page_bits.h"
#include "csrc/core/validate/rules.h"
#include "csrc/core/validate/table_scan.h"

namespace pagemill::internal {
namespace {

// Wider than any sequence, and far from overflow.
constexpr int64_t kWidestWindow = int64_t{1} << 32;

// Slots of bad rows that are looked at together: they fit the first cache.
constexpr int64_t kSlotsAtOnce = 4096;

// Never shrinks: what grows again is zeroed.
template <typename T>
T* AtLeast(std::vector<T>& memory, size_t size) {
  if (memory.size() < size) memory.resize(size);
  return memory.data();
}

// Rows whose written page is fetched ahead; each lies in a line of its own.
constexpr int64_t kRowsAhead = 16;

ScanMemory& MemoryOfThread() {
  thread_local ScanMemory memory;
  return memory;
}

// Divides by the page size; the usual power of two costs a shift.
class Pages {
 public:
  explicit Pages(int64_t page_size)
      : page_size_(static_cast<uint32_t>(page_size)),
        shift_(std::has_single_bit(page_size_) ? std::countr_zero(page_size_)
                                               : -1) {}
  int32_t Before(int64_t position) const {
    const uint32_t p = static_cast<uint32_t>(position);
    return static_cast<int32_t>(shift_ >= 0 ? p >> shift_ : p / page_size_);
  }

 private:
  uint32_t page_size_;
  int shift_;
};

}  // namespace

Scan::Scan(const BatchView& batch, Level level, const TableScanner& scanner)
    : batch_(batch), scanner_(scanner), memory_(MemoryOfThread()) {
  const size_t rows = static_cast<size_t>(batch.num_seqs);
  AtLeast(memory_.flags, rows);
  AtLeast(memory_.hits, rows);
  AtLeast(memory_.slots, rows);
  memory_.written_twice.clear();
  bool bad = ScanLengths();
  if (level == Level::kFull) MarkWritten();
  bad |= !memory_.written_twice.empty();
  bad |= scanner_.scan(Table(marked_ ? memory_.marks.words() : nullptr));
  if (batch.slot_mapping != nullptr) bad |= ScanTokens();
  clean_ = !bad;
}

Scan::~Scan() {
  if (marked_) ClearWritten();
}

TableScan Scan::Table(const uint32_t* marks) {
  return {.page_indices = batch_.page_indices,
          .pages_per_seq = batch_.pages_per_seq,
          .rows = memory_.slots.data(),
          .num_rows = batch_.num_seqs,
          .total_num_pages = static_cast<uint32_t>(batch_.total_num_pages),
          .marks = marks,
          .filter = filter_bits_ != 0 ? memory_.filter.data() : nullptr,
          .filter_bits = filter_bits_,
          .flags = memory_.flags.data(),
          .hits = memory_.hits.data()};
}

std::span<const int32_t> Scan::BadRows() {
  int32_t* rows =
      AtLeast(memory_.bad_rows, static_cast<size_t>(batch_.num_seqs));
  size_t count = 0;
  // Without branches: bad rows come as nobody can guess.
  for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
    rows[count] = static_cast<int32_t>(seq);
    count += Has(seq, kBadLengths | kPageOutside | kBadOwnership);
  }
  return {rows, count};
}

size_t Scan::RowsAtOnce() const {
  return static_cast<size_t>(std::max<int64_t>(
      kSlotsAtOnce / std::max<int64_t>(batch_.pages_per_seq, 1), 1));
}

void Scan::FindSlots(std::span<const int32_t> rows) {
  scanner_.find(Table(marked_ ? memory_.marks.words() : nullptr), rows.data(),
                static_cast<int64_t>(rows.size()),
                AtLeast(memory_.found, rows.size() * batch_.pages_per_seq),
                AtLeast(memory_.ends, rows.size()));
}

bool Scan::ScanLengths() {
  const BatchView& b = batch_;
  const int64_t capacity = b.pages_per_seq * b.page_size;
  const int64_t window = b.sliding_window > 0
                             ? std::min(b.sliding_window, kWidestWindow)
                             : kWidestWindow;
  const Pages pages(b.page_size);
  bool any = false;
  for (int64_t seq = 0; seq < b.num_seqs; ++seq) {
    const int64_t q_len = b.q_len(seq), kv_len = b.kv_len(seq);
    const bool bad =
        (q_len < 0) | (q_len > kv_len) | (kv_len < 0) | (kv_len > capacity);
    const int64_t first_query = kv_len - q_len;
    const int64_t first_key = std::max<int64_t>(first_query - (window - 1), 0);
    const int32_t live = pages.Before(kv_len + b.page_size - 1);
    const int32_t written = q_len == 0 ? live : pages.Before(first_query);
    memory_.slots[seq] = bad ? RowSlots{0, 0, 0}
                             : RowSlots{pages.Before(first_key), written, live};
    memory_.flags[seq] = bad ? kBadLengths : 0;
    num_written_ += memory_.slots[seq].end - memory_.slots[seq].written;
    any |= bad;
  }
  return any;
}

void Scan::ChooseFilter() {
  for (const TableFilter& filter :
       std::span(scanner_.filters, scanner_.num_filters)) {
    if (batch_.total_num_pages > filter.max_pages_without &&
        num_written_ <= filter.max_written) {
      filter_bits_ = filter.bits;
      return;
    }
  }
}

void Scan::MarkWritten() {
  memory_.marks.Reserve(batch_.total_num_pages);
  marked_ = true;
  ChooseFilter();
  memory_.filter.assign(filter_bits_ / 32, 0);
  const auto add_to_filter = [words = memory_.filter.data(),
                              low = filter_bits_ - 1](uint32_t page) {
    words[(page & low) / 32] |= uint32_t{1} << (page % 32);
  };
  WrittenSlot* const first =
      AtLeast(memory_.written, static_cast<size_t>(num_written_));
  WrittenSlot* next = first;
  const uint32_t total = static_cast<uint32_t>(batch_.total_num_pages);
  for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
    const RowSlots row = memory_.slots[seq];
    const int32_t* pages = batch_.pages(seq);
    if (seq + kRowsAhead < batch_.num_seqs) {
      __builtin_prefetch(batch_.pages(seq + kRowsAhead) +
                         memory_.slots[seq + kRowsAhead].written);
    }
    for (int32_t slot = row.written; slot < row.end; ++slot) {
      const uint32_t page = static_cast<uint32_t>(pages[slot]);
      if (page >= total) continue;
      *next++ = {static_cast<int32_t>(seq), slot, pages[slot]};
      if (filter_bits_ != 0) add_to_filter(page);
      if (!memory_.marks.Set(page)) {
        memory_.written_twice.push_back(pages[slot]);
      }
    }
  }
  written_ = {first, next};
}

void Scan::ClearWritten() {
  for (const WrittenSlot& slot : written_) {
    memory_.marks.ClearAround(static_cast<uint32_t>(slot.page));
  }
}

bool Scan::ScanTokens() {
  bool all_sound = true, any = false;
  for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
    if (!is_sound(seq) || !TokensInBuffer(batch_, seq)) {
      all_sound = false;
      continue;
    }
    if (RowTokensHold(batch_, seq)) continue;
    memory_.flags[seq] |= kBadTokens;
    any = true;
  }
  return any || !all_sound || !DeadTokensHold(batch_);
}

}  // namespace pagemill::internal
