#include "csrc/core/page_pool.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

Status OutOfPages(int64_t need, int64_t free) {
  return {StatusCode::kResourceExhausted,
          StrCat("the request needs ", need, " pages and ", free,
                 " are free. Close or preempt sequences, then try again."),
          Shortage{need, free}};
}

}  // namespace

Result<std::unique_ptr<PagePool>> PagePool::Create(int64_t total_num_pages,
                                                   int64_t page_size) {
  if (total_num_pages < 1 || total_num_pages > kInt32Max) {
    return InvalidArgument(StrCat("total_num_pages=", total_num_pages,
                                  " must be in range [1, ", kInt32Max,
                                  "]. Pass the KV cache's pages."));
  }
  if (page_size < 1 || page_size > kInt32Max) {
    return InvalidArgument(StrCat("page_size=", page_size,
                                  " must be in range [1, ", kInt32Max, "]."));
  }
  if (total_num_pages * page_size > kInt32Max) {
    return InvalidArgument(StrCat(
        "total_num_pages=", total_num_pages, " times page_size=", page_size,
        " is ", total_num_pages * page_size,
        " token slots, which do not fit int32. Use fewer pages."));
  }
  return std::unique_ptr<PagePool>(new PagePool(total_num_pages, page_size));
}

PagePool::PagePool(int64_t total_num_pages, int64_t page_size)
    : total_num_pages_(total_num_pages),
      page_size_(page_size),
      reference_counts_(total_num_pages, 0),
      free_pages_(total_num_pages) {
  for (int64_t i = 0; i < total_num_pages; ++i) {
    free_pages_[i] = static_cast<int32_t>(total_num_pages - 1 - i);
  }
}

SequenceHandle PagePool::Open() {
  std::lock_guard lock(mutex_);
  return OpenLocked();
}

SequenceHandle PagePool::OpenLocked() {
  uint32_t slot;
  if (free_slots_.empty()) {
    slot = static_cast<uint32_t>(sequences_.size());
    sequences_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  Sequence& seq = sequences_[slot];
  seq.open = true;
  ++num_open_;
  return int64_t{slot} | int64_t{seq.generation} << 32;
}

Status PagePool::Close(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  DropPending(seq);
  for (int32_t page : seq.pages) Release(page);
  // A slot whose generations are used up is never opened again.
  const bool reusable = seq.generation < uint32_t{kInt32Max};
  const uint32_t next = seq.generation + 1;
  seq = Sequence();
  seq.generation = next;
  --num_open_;
  if (reusable) free_slots_.push_back(slot);
  return Status();
}

Result<SequenceHandle> PagePool::Fork(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  const bool partial = sequences_[slot].length % page_size_ != 0;
  if (partial && free_pages_.empty()) return OutOfPages(1, 0);

  const SequenceHandle fork = OpenLocked();  // may move sequences_
  const Sequence& from = sequences_[slot];
  Sequence& to = sequences_[SlotOf(fork)];
  to.length = from.length;
  to.pages = from.pages;
  if (partial) {
    // Where the original's own copy is still pending, its page is not written
    // yet: copy from the same source.
    const int32_t source = from.pending == kNone
                               ? to.pages.back()
                               : pending_[from.pending].copy.source;
    to.pages.back() = TakeFree();
    ++reference_counts_[source];
    AddPending(fork, {source, to.pages.back()});
  }
  const size_t shared = to.pages.size() - (partial ? 1 : 0);
  for (size_t i = 0; i < shared; ++i) ++reference_counts_[to.pages[i]];
  return fork;
}

Status PagePool::Truncate(SequenceHandle handle, int64_t length) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  if (length < 0 || length > seq.length) {
    return InvalidArgument(
        StrCat("length=", length, " must be in range [0, ", seq.length,
               "], the sequence's own length. Truncating never adds tokens."));
  }
  // Nothing to forget: no copy is due, even if a fork waits for the last page.
  if (length == seq.length) return Status();
  const size_t keep = static_cast<size_t>(PagesFor(length));
  const bool drops_last = keep < seq.pages.size();
  const bool partial = length % page_size_ != 0;
  const bool copy = partial && reference_counts_[seq.pages[keep - 1]] > 1;
  const bool frees = std::any_of(
      seq.pages.begin() + static_cast<std::ptrdiff_t>(keep), seq.pages.end(),
      [this](int32_t page) { return reference_counts_[page] == 1; });
  if (copy && free_pages_.empty() && !frees) return OutOfPages(1, 0);

  if (drops_last) DropPending(seq);  // it is about the last page
  while (seq.pages.size() > keep) {
    Release(seq.pages.back());
    seq.pages.pop_back();
  }
  seq.length = length;
  if (copy) {
    const int32_t source = seq.pages.back();
    seq.pages.back() = TakeFree();
    // The sequence's own reference becomes the pending copy's.
    AddPending(handle, {source, seq.pages.back()});
  }
  return Status();
}

Result<int64_t> PagePool::Length(SequenceHandle handle) const {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  return sequences_[slot].length;
}

Result<std::vector<int32_t>> PagePool::Pages(SequenceHandle handle) const {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  return sequences_[slot].pages;
}

Result<int32_t> PagePool::ReferenceCount(int64_t page) const {
  if (page < 0 || page >= total_num_pages_) {
    return InvalidArgument(StrCat("page=", page, " must be in range [0, ",
                                  total_num_pages_, ")."));
  }
  std::lock_guard lock(mutex_);
  return reference_counts_[page];
}

std::vector<PageCopy> PagePool::TakePageCopies() {
  std::lock_guard lock(mutex_);
  std::vector<PageCopy> copies;
  copies.reserve(pending_.size());
  for (const PendingCopy& pending : pending_) {
    copies.push_back(pending.copy);
    sequences_[SlotOf(pending.handle)].pending = kNone;
    Release(pending.copy.source);
  }
  pending_.clear();
  return copies;
}

int64_t PagePool::num_free_pages() const {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(free_pages_.size());
}

int64_t PagePool::num_sequences() const {
  std::lock_guard lock(mutex_);
  return num_open_;
}

Status PagePool::Find(SequenceHandle handle, uint32_t* slot) const {
  *slot = SlotOf(handle);
  const int64_t generation = handle >> 32;
  const auto refuse = [&](const char* why) {
    return InvalidArgument(
        StrCat("sequence ", *slot, " (generation ", generation, ") ", why));
  };
  if (handle < 0 || *slot >= sequences_.size() ||
      generation > int64_t{sequences_[*slot].generation}) {
    return refuse("is not of this pool. Use what open returned.");
  }
  const Sequence& seq = sequences_[*slot];
  if (generation < int64_t{seq.generation} || !seq.open) {
    return refuse(
        "is closed. Open a new one; a closed sequence keeps nothing.");
  }
  return Status();
}

Status PagePool::CheckAppend(std::span<const SequenceHandle> handles,
                             std::span<const int64_t> counts, int64_t max_pages,
                             int64_t* need) {
  ++appends_;
  *need = 0;
  for (size_t i = 0; i < handles.size(); ++i) {
    uint32_t slot;
    if (Status status = Find(handles[i], &slot); !status.ok()) {
      return InvalidArgument(StrCat("requests[", i, "]: ", status.message()));
    }
    Sequence& seq = sequences_[slot];
    if (std::exchange(seq.last_append, appends_) == appends_) {
      return InvalidArgument(
          StrCat("requests[", i, "] names sequence ", slot,
                 " twice in one step. Add its token counts up."));
    }
    if (seq.pending != kNone) {
      return InvalidArgument(
          StrCat("requests[", i, "]: sequence ", slot,
                 " waits for the copy of a page. Call take_page_copies() and "
                 "apply the copies with copy_pages before planning it."));
    }
    const int64_t pages = PagesFor(seq.length + counts[i]);
    if (pages > max_pages) {
      return InvalidArgument(
          StrCat("requests[", i, "]: sequence ", slot, " has ", seq.length,
                 " tokens; with ", counts[i], " more it needs ", pages,
                 " pages, and pages_per_seq=", max_pages,
                 ". Use a planner with longer rows, or larger pages."));
    }
    *need += pages - static_cast<int64_t>(seq.pages.size());
  }
  return Status();
}

Status PagePool::Extend(std::span<const SequenceHandle> handles,
                        std::span<const int64_t> counts, int64_t max_pages) {
  int64_t need;
  if (Status status = CheckAppend(handles, counts, max_pages, &need);
      !status.ok()) {
    return status;
  }
  const int64_t free = static_cast<int64_t>(free_pages_.size());
  if (need > free) return OutOfPages(need, free);
  for (size_t i = 0; i < handles.size(); ++i) {
    Sequence& seq = sequences_[SlotOf(handles[i])];
    seq.length += counts[i];
    const size_t pages = static_cast<size_t>(PagesFor(seq.length));
    while (seq.pages.size() < pages) seq.pages.push_back(TakeFree());
  }
  return Status();
}

int32_t PagePool::TakeFree() {
  const int32_t page = free_pages_.back();
  free_pages_.pop_back();
  reference_counts_[page] = 1;
  return page;
}

void PagePool::Release(int32_t page) {
  if (--reference_counts_[page] == 0) free_pages_.push_back(page);
}

void PagePool::AddPending(SequenceHandle handle, PageCopy copy) {
  sequences_[SlotOf(handle)].pending = static_cast<int32_t>(pending_.size());
  pending_.push_back({handle, copy});
}

// The order of copies means nothing: no page is both a source and a target.
void PagePool::DropPending(Sequence& seq) {
  const int32_t index = std::exchange(seq.pending, kNone);
  if (index == kNone) return;
  Release(pending_[index].copy.source);
  if (pending_[index].handle != pending_.back().handle) {
    pending_[index] = pending_.back();
    sequences_[SlotOf(pending_[index].handle)].pending = index;
  }
  pending_.pop_back();
}

Status PagePool::Audit() const {
  std::lock_guard lock(mutex_);
  std::vector<int32_t> counts(total_num_pages_, 0);
  std::vector<int32_t> holders(total_num_pages_, 0);
  for (const PendingCopy& pending : pending_) ++counts[pending.copy.source];
  for (const Sequence& seq : sequences_) {
    if (static_cast<int64_t>(seq.pages.size()) != PagesFor(seq.length)) {
      return Internal("a sequence's pages do not match its length");
    }
    if (!seq.open && !seq.pages.empty()) {
      return Internal("a closed sequence holds pages");
    }
    for (int32_t page : seq.pages) {
      ++counts[page];
      ++holders[page];
    }
  }
  if (counts != reference_counts_) return Internal("reference counts drifted");
  for (const Sequence& seq : sequences_) {
    if (seq.length % page_size_ != 0 && holders[seq.pages.back()] != 1) {
      return Internal("a partly filled page is shared");
    }
  }
  std::vector<bool> free(total_num_pages_, false);
  for (int32_t page : free_pages_) {
    if (counts[page] != 0 || free[page]) {
      return Internal(StrCat("page ", page, " is wrongly free"));
    }
    free[page] = true;
  }
  const int64_t unused = std::count(counts.begin(), counts.end(), 0);
  if (unused != static_cast<int64_t>(free_pages_.size())) {
    return Internal("unused pages are missing from the free list");
  }
  return Status();
}

}  // namespace pagemill
