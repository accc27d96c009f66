// Steps of a PagePool: reserve, commit, abort, retire.
#include <algorithm>
#include <cstddef>

#include "csrc/core/pool/page_pool.h"
#include "csrc/core/str_cat.h"

namespace pagemill {
// A page that copies are due from, but no other sequence lists, may be written:
// what is appended lies past what the copies are for.
bool PagePool::MayWriteLastPages(const Sequence& seq) const {
  const auto may = [this](int32_t page) {
    if (pages_.IsPrivate(page)) return true;
    int32_t copies = 0;
    for (const PendingCopy& pending : pending_) {
      for (const PageCopy& copy : pending.copies) copies += copy.source == page;
    }
    return pages_.state(page) != PageState::kPublished &&
           pages_.references(page) == 1 + copies;
  };
  return std::all_of(seq.pages().end() - num_groups_, seq.pages().end(), may);
}

// Why the row may not be written.
Status PagePool::Explain(const PoolStep& step, size_t row, int32_t request,
                         int64_t max_pages, bool twice) const {
  const auto refuse = [&](auto... text) {
    return InvalidArgument(StrCat("requests[", request, "]", text...));
  };
  uint32_t slot;
  if (Status status = FindOpen(step.handles[row], &slot); !status.ok()) {
    return refuse(": ", status.message());
  }
  const Sequence& seq = sequences_[slot];
  if (twice) {
    return refuse(" names sequence ", slot,
                  " twice in one step. Add its token counts up.");
  }
  if (seq.pending != kNone) {
    return refuse(": sequence ", slot,
                  " waits for the copy of a page. Call take_page_copies() and "
                  "apply the copies with copy_pages before planning it.");
  }
  const int64_t length = int64_t{seq.length} + step.counts[row];
  const int64_t slots = SlotsFor(length);
  if (slots > max_pages || length > kMaxLength) {
    return refuse(": sequence ", slot, " has ", seq.length, " tokens; with ",
                  step.counts[row], " more it needs ", slots,
                  " pages, and pages_per_seq=", max_pages,
                  ". Use a planner with longer rows, or larger pages.");
  }
  return Internal(
      StrCat("a page that sequence ", slot, " is about to write is shared"));
}

Status PagePool::CheckRows(std::span<const int32_t> order, int64_t max_pages,
                           const PoolStep& step) {
  if (++checks_ == 0) {  // every 2^32 times: no mark may look current
    for (Sequence& seq : sequences_) seq.mark = 0;
    ++checks_;
  }
  const int64_t max_length = std::min(max_pages * page_size(), kMaxLength);
  int64_t need = 0;
  for (size_t row = 0; row < step.handles.size(); ++row) {
    Sequence* seq = Alive(step.handles[row]);
    const bool twice = seq != nullptr && seq->mark == checks_;
    if (seq == nullptr || twice || seq->pending != kNone) {
      return Explain(step, row, order[row], max_pages, twice);
    }
    const int64_t before = seq->length, after = before + step.counts[row];
    if (after > max_length || !(IsFull(before) || MayWriteLastPages(*seq))) {
      return Explain(step, row, order[row], max_pages, false);
    }
    seq->mark = checks_;
    need += SlotsFor(after) - SlotsFor(before);
  }
  need *= num_groups_;
  return need > pages_.available() ? Short(need) : Status();
}

void PagePool::OpenStep(PoolStep& step) {
  step.id = pages_.BeginStep();
  step.open = step.in_flight = true;
  open_steps_.push_back(step.id);
}

void PagePool::Place(Sequence& seq, size_t row, PoolStep& step) {
  const int32_t before = seq.length, after = before + step.counts[row];
  seq.committed = Committed(seq);
  seq.last_step = step.id;
  seq.length = step.lengths[row] = after;
  const int64_t slots = SlotsFor(after) - SlotsFor(before);
  if (slots > 0) TakeSlots(seq, slots);
  if (slots > 0 || FullSlots(after) > FullSlots(before)) {
    step.changed.push_back(static_cast<int32_t>(row));
  }
}

bool PagePool::AppendOnes(Left left, int64_t max_pages, PoolStep& step,
                          int32_t* tails) {
  const size_t rows = step.handles.size();
  // Each row takes a page at most: then none is evicted, and all can be undone.
  if (!open_steps_.empty() || num_groups_ > 1 || has_windows_ ||
      static_cast<int64_t>(rows) > pages_.count(PageState::kFree)) {
    return false;
  }
  // Copies, which the compiler need not read anew after each store.
  const PageGeometry geometry = geometry_;
  const Pages::Privacy is_private = pages_.privacy();
  Sequence* const sequences = sequences_.data();
  const SequenceHandle* const handles = step.handles.data();
  int32_t* const lengths = step.lengths;
  const int64_t max_length = std::min(max_pages * page_size(), kMaxLength);
  const int64_t id = pages_.next_step();
  const int64_t last_in_page = page_size() - 1;
  step.changed.clear();
  for (size_t row = 0; row < rows; ++row) {
    Sequence& seq = sequences[SlotOf(handles[row])];
    const int32_t before = seq.length;
    const int64_t in_page = geometry.Remainder(before);
    if ((seq.layout != left.layouts[row]) | (before != left.lengths[row]) |
        (before >= max_length) | !(in_page == 0 || is_private(seq.tail)))
        [[unlikely]] {
      UndoOnes(step, row);
      return false;
    }
    if (in_page == 0 || (in_page == last_in_page &&
                         seq.num_keys > seq.published)) [[unlikely]] {
      step.changed.push_back(static_cast<int32_t>(row));
    }
    seq.committed = before;
    seq.last_step = id;
    seq.length = lengths[row] = before + 1;
    tails[row] = seq.tail;
  }
  TakeForOnes(step, tails);
  OpenStep(step);
  return true;
}

// Apart, with the rows known, so that what they need can be fetched ahead.
void PagePool::TakeForOnes(const PoolStep& step, int32_t* tails) {
  const size_t rows = step.changed.size();
  const auto sequence = [&](size_t i) -> Sequence& {
    return sequences_[SlotOf(step.handles[step.changed[i]])];
  };
  for (size_t i = 0; i < rows; ++i) {
    if (i + 12 < rows) {
      __builtin_prefetch(sequence(i + 12).details.get());
      const PageList& pages = sequence(i + 6).pages();
      __builtin_prefetch(pages.data() + pages.size());
    }
    Sequence& seq = sequence(i);
    if (!IsFull(seq.length - 1)) continue;
    TakeSlots(seq, 1);
    tails[step.changed[i]] = seq.tail;
  }
}

void PagePool::UndoOnes(const PoolStep& step, size_t rows) {
  while (rows-- > 0) {
    Sequence& seq = sequences_[SlotOf(step.handles[rows])];
    seq.last_step = -1;  // no step was open
    --seq.length;
  }
}

int32_t PagePool::EndOf(
    const PoolStep& step, size_t row,
    const std::vector<SequenceDetails::Truncation>& truncations) {
  for (const auto& note : truncations) {
    if (step.id < note.step) return std::min(step.lengths[row], note.length);
  }
  return step.lengths[row];
}

int32_t PagePool::ForkedTo(const PoolStep& step, size_t row) const {
  int32_t end = 0;
  for (const ForkNote& note : fork_notes_) {
    if (note.from != step.handles[row] || note.step <= step.id) continue;
    end = std::max(end,
                   std::min(note.length, EndOf(step, row, note.truncations)));
  }
  return end;
}

// Tokens at the end can be taken back only while nothing stands on them.
Status PagePool::CheckUndo(const PoolStep& step, size_t row, int32_t kept,
                           const char* what) {
  const uint32_t slot = SlotOf(step.handles[row]);
  const int32_t left = step.before(row) + kept;
  const auto refuse = [&](const char* why) {
    return InvalidArgument(
        StrCat(what, " row ", row, ", sequence ", slot, ": it ", why));
  };
  const Sequence* seq = Alive(step.handles[row]);
  const int32_t end =
      seq == nullptr ? 0 : EndOf(step, row, seq->details->truncations);
  if (end > left && seq->length > end) {
    return refuse("has been planned again since. Abort the later step first.");
  }
  // Also where this sequence has let go of them since.
  if (ForkedTo(step, row) > left) {
    return refuse("was forked with these tokens. Commit them, then truncate.");
  }
  return Status();
}

Status PagePool::CommitStep(PoolStep& step, std::span<const int32_t> accepted) {
  std::lock_guard lock(mutex_);
  for (size_t row = 0; row < accepted.size(); ++row) {
    if (accepted[row] < 0 || accepted[row] > step.counts[row]) {
      return InvalidArgument(StrCat("accepted[", row, "]=", accepted[row],
                                    " must be in range [0, ", step.counts[row],
                                    "], the tokens that the row brought."));
    }
    if (accepted[row] == step.counts[row]) continue;
    if (Status status = CheckUndo(step, row, accepted[row], "accepted of");
        !status.ok()) {
      return status;
    }
  }
  EndStep(step);
  // Other rows took and filled no page, and no other step is about to.
  if (accepted.empty() && !has_windows_ && open_steps_.empty()) {
    for (int32_t row : step.changed) {
      if (!CommitTail(step, row)) CommitRow(step, row, step.counts[row]);
    }
    return Status();
  }
  for (size_t row = 0; row < step.handles.size(); ++row) {
    CommitRow(step, row, accepted.empty() ? step.counts[row] : accepted[row]);
  }
  return Status();
}

// The common case: a sequence that nobody touched since took one page, and
// nothing is to be published.
bool PagePool::CommitTail(const PoolStep& step, size_t row) {
  const Sequence* seq = Alive(step.handles[row]);
  if (seq == nullptr || seq->last_step != step.id || num_groups_ > 1 ||
      seq->length != step.lengths[row] || seq->num_keys > seq->published ||
      SlotsFor(seq->length) - SlotsFor(step.before(row)) > 1) {
    return false;
  }
  pages_.Commit(seq->tail);
  return true;
}

void PagePool::CommitRow(const PoolStep& step, size_t row, int32_t kept) {
  Sequence* seq = Alive(step.handles[row]);
  if (seq == nullptr) return;
  const int32_t before = step.before(row);
  const int32_t left = EndOf(step, row, seq->details->truncations);
  const int32_t end = std::min(before + kept, left);
  if (end < left) {
    NoteTruncation(*seq, end);
    Shrink(*seq, end);
    Forget(*seq, end);
  }
  // Else it waits for steps before this one.
  if (seq->committed >= before) {
    if (seq->last_step > step.id) {
      seq->committed = std::max(seq->committed, end);
    } else if (seq->last_step == step.id) {
      seq->last_step = -1;
    }
  }
  const int64_t from = SlotsFor(before), to = SlotsFor(end);
  if (num_groups_ == 1 && to - from <= 1 && to == SlotsFor(seq->length)) {
    if (to > from) pages_.Commit(seq->tail);  // as decodes do
  } else {
    for (int64_t i = from * num_groups_; i < to * num_groups_; ++i) {
      if (seq->pages()[i] != kNone) pages_.Commit(seq->pages()[i]);
    }
  }
  if (seq->num_keys > seq->published) Publish(*seq);
  if (has_windows_) Trim(*seq);
}

Status PagePool::AbortStep(PoolStep& step) {
  std::lock_guard lock(mutex_);
  for (size_t row = 0; row < step.handles.size(); ++row) {
    if (Status status = CheckUndo(step, row, 0, "abort of"); !status.ok()) {
      return status;
    }
  }
  EndStep(step);
  // The last row first, so that a step planned anew gets the same pages.
  for (size_t row = step.handles.size(); row-- > 0;) {
    Sequence* seq = Alive(step.handles[row]);
    if (seq == nullptr) continue;
    const int32_t end = EndOf(step, row, seq->details->truncations);
    if (end > step.before(row)) {
      NoteTruncation(*seq, step.before(row));
      Shrink(*seq, step.before(row));
    }
    if (seq->last_step == step.id && seq->committed >= seq->length) {
      seq->last_step = -1;
    }
  }
  return Status();
}

void PagePool::EndStep(PoolStep& step) {
  std::erase(open_steps_, step.id);
  std::erase_if(fork_notes_, [this](const ForkNote& note) {
    return open_steps_.empty() || note.step <= open_steps_.front();
  });
  step.open = false;
}

Status PagePool::RetireStep(PoolStep& step) {
  std::lock_guard lock(mutex_);
  if (!pages_.RetireStep(step.id)) {
    return Internal("a step is retired that is not in flight");
  }
  step.in_flight = false;
  return Status();
}

}  // namespace pagemill
