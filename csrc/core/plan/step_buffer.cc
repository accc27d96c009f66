#include "csrc/core/plan/step_buffer.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <utility>

namespace pagemill {

StepBuffer::StepBuffer(const PlanSizes& sizes, const PagePool& pool)
    : sizes_(sizes),
      pool_(pool),
      groups_(pool.num_groups()),
      has_windows_(pool.has_windows()),
      layout_(sizes, groups_),
      memory_(layout_.size()),
      states_(sizes.max_num_seqs) {
  step.lengths = field(Field::kKvLens);
  memory_.Fill(0);
  std::fill_n(field(Field::kSlotMapping), layout_[Field::kSlotMapping].size,
              -1);
}

void StepBuffer::Begin(int32_t decodes) {
  const std::vector<int32_t>& counts = step.counts;
  const int32_t rows_before = rows_, tokens_before = tokens_;
  rows_ = static_cast<int32_t>(counts.size());
  int32_t* cu_q_lens = field(Field::kCuQLens);
  int32_t* logits = field(Field::kLogitsIndices);
  for (int32_t row = iota_rows_; row < decodes; ++row) {
    cu_q_lens[row + 1] = row + 1;
    logits[row] = row;
  }
  int32_t total = decodes;
  for (int32_t row = decodes; row < rows_; ++row) {
    total += counts[row];
    cu_q_lens[row + 1] = total;
    logits[row] = total - 1;
  }
  iota_rows_ = decodes;
  tokens_ = total;
  tail_holds_ &= rows_ == rows_before && tokens_ == tokens_before;
  dirty_rows_ = std::max(dirty_rows_, rows_);
  dirty_tokens_ = std::max(dirty_tokens_, tokens_);
}

void StepBuffer::WriteRow(size_t row, const PagePool::Placed& seq) {
  SyncRow(row, seq);
  const int32_t begin = field(Field::kCuQLens)[row];
  WriteTokens(begin, field(Field::kCuQLens)[row + 1] - begin, seq);
}

void StepBuffer::PrefetchPages(size_t row, const PagePool::Placed& seq) const {
  // What is behind them the hardware guesses.
  constexpr int32_t kMostPages = 1024, kPagesPerLine = 16;
  const int32_t slots =
      static_cast<int32_t>(pool_.geometry().SlotsFor(seq.length()));
  const int32_t from = states_[row].SlotsHeld(seq);
  const int32_t to = std::min(slots, from + kMostPages);
  for (int32_t slot = from; slot < to; slot += kPagesPerLine) {
    __builtin_prefetch(seq.pages() + slot * groups_);
  }
}

void StepBuffer::WriteDecodes() {
  const int32_t* kv_lens = field(Field::kKvLens);
  int32_t* positions = field(Field::kPositions);
  int32_t* slots = field(Field::kSlotMapping);
  const PageGeometry& geometry = pool_.geometry();
  const int32_t page_size = static_cast<int32_t>(geometry.page_size());
  for (int32_t row = 0; row < rows_; ++row) positions[row] = kv_lens[row] - 1;
  if (std::has_single_bit(static_cast<uint32_t>(page_size))) {
    for (int32_t row = 0; row < rows_; ++row) {
      slots[row] = slots[row] * page_size + (positions[row] & (page_size - 1));
    }
  } else {
    for (int32_t row = 0; row < rows_; ++row) {
      slots[row] = slots[row] * page_size + positions[row] % page_size;
    }
  }
}

void StepBuffer::SyncRow(size_t row, const PagePool::Placed& seq) {
  const int32_t slots =
      static_cast<int32_t>(pool_.geometry().SlotsFor(seq.length()));
  if (states_[row].Holds(seq, slots)) return;
  states_[row].Sync(
      seq, slots,
      [&](int32_t from, int32_t to) { WriteSlots(row, from, to, seq); },
      [&](int32_t from, int32_t to) { ClearSlots(row, from, to); },
      [&](int32_t from, int32_t to) { TrimSlots(row, from, to); });
}

void StepBuffer::MarkStale(std::span<const int32_t> rows) {
  if (all_stale_) return;
  if (stale_rows_.size() + rows.size() > states_.size()) return MarkAllStale();
  stale_rows_.insert(stale_rows_.end(), rows.begin(), rows.end());
}

void StepBuffer::MarkAllStale() {
  all_stale_ = true;
  stale_rows_.clear();
}

void StepBuffer::ClearStale() {
  all_stale_ = false;
  stale_rows_.clear();
}

void StepBuffer::WriteTokens(int32_t begin, int32_t count,
                             const PagePool::Placed& seq) {
  const PageGeometry& geometry = pool_.geometry();
  const int64_t page_size = geometry.page_size();
  int32_t* positions = field(Field::kPositions) + begin;
  int32_t* slots = field(Field::kSlotMapping) + begin;
  const int64_t first = seq.length() - count;
  if (count == 1 && groups_ == 1) {  // the usual case, too short for loops
    positions[0] = static_cast<int32_t>(first);
    slots[0] = static_cast<int32_t>(seq.sequence.tail * page_size +
                                    geometry.Remainder(first));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    positions[i] = static_cast<int32_t>(first + i);
  }
  for (int64_t i = 0, end; i < count; i = end) {  // page by page
    const int64_t slot = geometry.FullSlots(first + i);
    const int64_t offset = geometry.Remainder(first + i);
    end = std::min<int64_t>(count, i + page_size - offset);
    for (int64_t group = 0; group < groups_; ++group) {
      const int64_t base =
          seq.pages()[slot * groups_ + group] * page_size + offset - i;
      int32_t* out = slots + group * sizes_.max_num_tokens;
      for (int64_t j = i; j < end; ++j) out[j] = static_cast<int32_t>(base + j);
    }
  }
}

void StepBuffer::WriteSlots(size_t row, int32_t from, int32_t to,
                            const PagePool::Placed& seq) {
  if (groups_ == 1 && !has_windows_) {
    const int32_t* pages = seq.pages();
    int32_t* out = table_row(0, row);
    if (to - from == 1) {  // the usual case, too short for a call
      out[from] = seq.sequence.tail;
    } else {
      std::copy(pages + from, pages + to, out + from);
    }
    return;
  }
  for (int64_t group = 0; group < groups_; ++group) {
    int32_t* pages = table_row(group, row);
    for (int64_t slot = from; slot < to; ++slot) {
      pages[slot] = std::max(seq.pages()[slot * groups_ + group], 0);
    }
  }
}

void StepBuffer::ClearSlots(size_t row, int32_t from, int32_t to) {
  for (int64_t group = 0; group < groups_; ++group) {
    std::fill(table_row(group, row) + from, table_row(group, row) + to, 0);
  }
}

void StepBuffer::TrimSlots(size_t row, int32_t from_length, int32_t to_length) {
  for (int64_t group = 0; group < groups_; ++group) {
    std::fill(table_row(group, row) + pool_.PassedSlots(group, from_length),
              table_row(group, row) + pool_.PassedSlots(group, to_length), 0);
  }
}

void StepBuffer::Finish(int32_t prefill_end) {
  for (int32_t row = rows_; row < dirty_rows_; ++row) {
    states_[row].Leave(
        [&](int32_t from, int32_t to) { ClearSlots(row, from, to); });
  }
  const auto fill_dead = [&](Field name, int64_t live, int64_t before,
                             int32_t value) {
    if (live < before)
      std::fill(field(name) + live, field(name) + before, value);
  };
  fill_dead(Field::kKvLens, rows_, dirty_rows_, 0);
  fill_dead(Field::kLogitsIndices, rows_, dirty_rows_, 0);
  fill_dead(Field::kPositions, tokens_, dirty_tokens_, 0);
  for (int64_t group = 0; group < groups_; ++group) {
    const int64_t base = group * sizes_.max_num_tokens;
    fill_dead(Field::kSlotMapping, base + tokens_, base + dirty_tokens_, -1);
  }
  dirty_rows_ = rows_;
  dirty_tokens_ = tokens_;
  if (!std::exchange(tail_holds_, true)) {
    fill_dead(Field::kCuQLens, rows_ + 1, sizes_.max_num_seqs + 1, tokens_);
  }
  *field(Field::kNumSeqs) = rows_;
  int32_t* distribution = field(Field::kDistribution);
  distribution[0] = iota_rows_;
  distribution[1] = prefill_end;
  distribution[2] = rows_;
}

BatchView StepBuffer::View(int64_t group, int64_t max_num_seqs,
                           int64_t max_num_tokens) const {
  const int64_t table = sizes_.max_num_seqs * sizes_.pages_per_seq;
  return {.kv_lens = field(Field::kKvLens),
          .page_indices = field(Field::kPageIndices) + group * table,
          .cu_q_lens = field(Field::kCuQLens),
          .distribution = field(Field::kDistribution),
          .slot_mapping =
              field(Field::kSlotMapping) + group * sizes_.max_num_tokens,
          .num_seqs = rows_,
          .max_num_seqs = max_num_seqs,
          .pages_per_seq = sizes_.pages_per_seq,
          .page_size = pool_.page_size(),
          .total_num_pages = pool_.total_num_pages(),
          .max_num_tokens = max_num_tokens};
}

Int32Array StepBuffer::Copy(int64_t max_num_seqs,
                            int64_t max_num_tokens) const {
  const BlobLayout to({max_num_tokens, max_num_seqs, sizes_.pages_per_seq},
                      groups_);
  Int32Array copy(to.size());
  for (size_t i = 0; i < kNumFields; ++i) {
    const Field name = static_cast<Field>(i);
    // Rows of a group's slots or table are narrower in the copy.
    const bool grouped =
        name == Field::kSlotMapping || name == Field::kPageIndices;
    const int64_t parts = grouped ? groups_ : 1;
    const int64_t size = to[name].size / parts;
    for (int64_t part = 0; part < parts; ++part) {
      const int32_t* source = field(name) + part * (layout_[name].size / parts);
      std::copy(source, source + size,
                copy.data() + to[name].offset + part * size);
    }
  }
  return copy;
}

}  // namespace pagemill
