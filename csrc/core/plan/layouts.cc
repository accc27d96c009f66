#include "csrc/core/plan/layouts.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

int64_t SlotsOf(const BatchView& batch, int64_t seq) {
  return (batch.kv_len(seq) + batch.page_size - 1) / batch.page_size;
}

Status CheckCapacity(const BatchView& batch, std::span<int32_t> pages) {
  const int64_t capacity = static_cast<int64_t>(pages.size());
  const int64_t need = CountPages(batch);
  if (need <= capacity) return Status();
  return InvalidArgument(
      StrCat("capacity=", capacity, " must be at least ", need,
             ", the pages of the batch's ", batch.num_seqs,
             " live sequences (ceil(kv_len / page_size) each). Raise capacity; "
             "max_num_seqs * pages_per_seq=",
             batch.max_num_seqs * batch.pages_per_seq, " is always enough."));
}

// The rows' live slots one after the other, then zeros.
void Concatenate(const BatchView& batch, std::span<int32_t> pages) {
  auto out = pages.begin();
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    out = std::copy_n(batch.pages(seq), SlotsOf(batch, seq), out);
  }
  std::fill(out, pages.end(), 0);
}

// 0 and the running sum of live rows' slots, each times `unit`; the total after
// them.  Returns the total.
int64_t SumSlots(const BatchView& batch, int64_t unit,
                 std::span<int32_t> sums) {
  int64_t total = 0;
  size_t at = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    sums[at++] = static_cast<int32_t>(total);
    total += SlotsOf(batch, seq) * unit;
  }
  std::fill(sums.begin() + at, sums.end(), static_cast<int32_t>(total));
  return total;
}

}  // namespace

int64_t CountPages(const BatchView& batch) {
  int64_t pages = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    pages += SlotsOf(batch, seq);
  }
  return pages;
}

void WriteFlat(const BatchView& batch, std::span<int32_t> table) {
  auto row = table.begin();
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const auto end = row + batch.pages_per_seq;
    std::fill(std::copy_n(batch.pages(seq), SlotsOf(batch, seq), row), end, 0);
    row = end;
  }
  std::fill(row, table.end(), 0);
}

Status WriteRagged(const BatchView& batch, std::span<int32_t> cu_kv_lens,
                   std::span<int32_t> pages) {
  if (Status status = CheckCapacity(batch, pages); !status.ok()) return status;
  const int64_t total = SumSlots(batch, batch.page_size, cu_kv_lens);
  if (total > std::numeric_limits<int32_t>::max()) {
    // Possible where sequences share pages.
    return InvalidArgument(
        StrCat("the sum of kv_lens rounded up to pages is ", total,
               ", which cu_kv_lens cannot hold as int32. Split the batch."));
  }
  Concatenate(batch, pages);
  return Status();
}

Status WriteIndptr(const BatchView& batch, std::span<int32_t> kv_indptr,
                   std::span<int32_t> last_page_len, std::span<int32_t> pages) {
  if (Status status = CheckCapacity(batch, pages); !status.ok()) return status;
  SumSlots(batch, 1, kv_indptr);
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t full = std::max<int64_t>(SlotsOf(batch, seq) - 1, 0);
    last_page_len[seq] =
        static_cast<int32_t>(batch.kv_len(seq) - full * batch.page_size);
  }
  std::fill(last_page_len.begin() + batch.num_seqs, last_page_len.end(), 0);
  Concatenate(batch, pages);
  return Status();
}

void WriteSlotMapping(const BatchView& batch, std::span<int32_t> slots) {
  const int64_t page_size = batch.page_size;
  int64_t token = 0;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const int64_t length = batch.kv_len(seq);
    for (int64_t at = length - batch.q_len(seq); at < length; ++at) {
      slots[token++] = static_cast<int32_t>(
          batch.pages(seq)[at / page_size] * page_size + at % page_size);
    }
  }
  std::fill(slots.begin() + token, slots.end(), -1);
}

}  // namespace pagemill
