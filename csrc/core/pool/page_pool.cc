#include "csrc/core/pool/page_pool.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <random>
#include <utility>

#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr size_t kSecretBytes = 32;

Status CheckRange(const char* name, int64_t value, int64_t max,
                  const char* remedy) {
  if (value >= 1 && value <= max) return Status();
  return InvalidArgument(
      StrCat(name, "=", value, " must be in range [1, ", max, "]. ", remedy));
}

Status CheckOptions(const PagePoolOptions& o) {
  if (Status status =
          CheckRange("total_num_pages", o.total_num_pages, Pages::kMaxPages,
                     "Pass the KV cache's pages.");
      !status.ok()) {
    return status;
  }
  if (Status status = CheckRange("page_size", o.page_size, kInt32Max,
                                 "Pass the tokens of a page.");
      !status.ok()) {
    return status;
  }
  if (o.total_num_pages * o.page_size > kInt32Max) {
    return InvalidArgument(StrCat(
        "total_num_pages=", o.total_num_pages, " times page_size=", o.page_size,
        " is ", o.total_num_pages * o.page_size,
        " token slots, which do not fit int32. Use fewer pages."));
  }
  if (o.sliding_windows.empty()) {
    return InvalidArgument(
        "sliding_windows must name at least one KV group. Pass one entry for "
        "each group of layers, none for full attention.");
  }
  for (size_t group = 0; group < o.sliding_windows.size(); ++group) {
    const int64_t window = o.sliding_windows[group];
    if (window >= 0 && window <= kInt32Max) continue;
    return InvalidArgument(
        StrCat("sliding_windows[", group, "]=", window,
               " must be in range [1, ", kInt32Max,
               "]. Count the keys that a query sees, itself "
               "included, or pass none for full attention."));
  }
  return Status();
}

std::vector<uint8_t> DrawSecret() {
  std::random_device device;
  std::vector<uint8_t> secret(kSecretBytes);
  for (uint8_t& byte : secret) byte = static_cast<uint8_t>(device());
  return secret;
}

}  // namespace

// ----------------------------------------------------------------- life cycle

Result<std::unique_ptr<PagePool>> PagePool::Create(PagePoolOptions options) {
  if (Status status = CheckOptions(options); !status.ok()) return status;
  if (options.secret.empty()) options.secret = DrawSecret();
  return std::unique_ptr<PagePool>(new PagePool(std::move(options)));
}

PagePool::PagePool(PagePoolOptions options)
    : geometry_(options.page_size),
      windows_(std::move(options.sliding_windows)),
      num_groups_(static_cast<int64_t>(windows_.size())),
      has_windows_(std::any_of(windows_.begin(), windows_.end(),
                               [](int64_t window) { return window != 0; })),
      prefix_cache_(options.prefix_cache),
      secret_(std::move(options.secret)),
      pages_(options.total_num_pages, options.prefix_cache,
             static_cast<size_t>(std::max<int64_t>(options.max_events, 0))) {}

SequenceHandle PagePool::OpenSlot() {
  uint32_t slot;
  if (free_slots_.empty()) {
    slot = static_cast<uint32_t>(sequences_.size());
    sequences_.emplace_back();
    sequences_.back().details =
        std::make_unique<SequenceDetails>(lists_.resource());
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  Sequence& seq = sequences_[slot];
  seq.state = SequenceState::kOpen;
  seq.layout = ++layouts_;
  ++num_open_;
  return int64_t{slot} | int64_t{seq.generation} << 32;
}

Status PagePool::Close(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  DropPending(seq);
  DropSlots(seq, 0);
  // A slot whose generations are used up is never opened again.
  const bool reusable = seq.generation < uint32_t{kInt32Max};
  const uint32_t next = seq.generation + 1;
  std::unique_ptr<SequenceDetails> details = std::move(seq.details);
  details->Clear();  // keeps its memory for the next sequence
  seq = Sequence{.generation = next, .details = std::move(details)};
  seq.layout = ++layouts_;
  --num_open_;
  if (reusable) free_slots_.push_back(slot);
  return Status();
}

Status PagePool::Find(SequenceHandle handle, uint32_t* slot) const {
  *slot = SlotOf(handle);
  const int64_t generation = handle >> 32;
  if (*slot < sequences_.size()) [[likely]] {
    const Sequence& seq = sequences_[*slot];
    if (generation == int64_t{seq.generation} &&
        seq.state != SequenceState::kClosed) [[likely]] {
      return Status();
    }
  }
  const bool closed = handle >= 0 && *slot < sequences_.size() &&
                      generation <= int64_t{sequences_[*slot].generation};
  return InvalidArgument(StrCat(
      "sequence ", *slot, " (generation ", generation, ") ",
      closed ? "is closed. Open a new one; a closed sequence keeps nothing."
             : "is not of this pool. Use what open returned."));
}

Status PagePool::FindOpen(SequenceHandle handle, uint32_t* slot) const {
  if (Status status = Find(handle, slot); !status.ok()) return status;
  if (sequences_[*slot].state == SequenceState::kOpen) return Status();
  return InvalidArgument(
      StrCat("sequence ", *slot, " is swapped out. Call swap_in first."));
}

// --------------------------------------------------------------- page slots

Status PagePool::Short(int64_t need) const {
  const Shortage shortage{.need = need,
                          .free = pages_.count(PageState::kFree),
                          .evictable = pages_.count(PageState::kEvictable),
                          .fenced = pages_.count(PageState::kFenced)};
  std::string text = StrCat("the request needs ", need, " pages and ",
                            shortage.free, " are free");
  if (shortage.evictable > 0) {
    text += StrCat(", ", shortage.evictable, " more can be evicted");
  }
  if (shortage.fenced > 0) {
    text += StrCat(", and ", shortage.fenced,
                   " will be once the steps in flight are retired");
  }
  text += need > total_num_pages()
              ? StrCat(". The pool has ", total_num_pages(),
                       " in all: such a request can never be served.")
              : std::string(". Close or preempt sequences, then try again.");
  return {StatusCode::kResourceExhausted, std::move(text), shortage};
}

void PagePool::DropSlots(Sequence& seq, int64_t keep) {
  const size_t size = static_cast<size_t>(keep * num_groups_);
  if (seq.pages().size() <= size) return;
  for (size_t i = seq.pages().size(); i-- > size;) {
    if (seq.pages()[i] != kNone) pages_.Release(seq.pages()[i]);
  }
  seq.pages().resize(size);
  SetTail(seq);
  seq.layout = ++layouts_;
}

void PagePool::TakeSlots(Sequence& seq, int64_t slots) {
  if (slots == 0) return;
  PageList& pages = seq.pages();
  for (int64_t i = slots * num_groups_; i > 0; --i) {
    pages.push_back(pages_.Take());
  }
  SetTail(seq);
}

void PagePool::Shrink(Sequence& seq, int32_t length) {
  DropSlots(seq, SlotsFor(length));
  seq.length = length;
  seq.committed = std::min(seq.committed, length);
  seq.published =
      std::min(seq.published, static_cast<int32_t>(FullSlots(length)));
  if (length == 0) seq.trimmed = 0;
}

// ---------------------------------------------------------- fork and truncate

Result<SequenceHandle> PagePool::Fork(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = FindOpen(handle, &slot); !status.ok()) return status;
  const bool partial = !IsFull(sequences_[slot].length);
  const int64_t need = partial ? num_groups_ : 0;
  if (need > pages_.available()) return Short(need);

  const SequenceHandle fork = OpenSlot();  // may move sequences_
  Sequence& from = sequences_[slot];
  Sequence& to = sequences_[SlotOf(fork)];
  to.length = from.length;
  to.committed = from.committed;
  to.last_step = from.last_step;
  to.trimmed = from.trimmed;
  to.published = from.published;
  to.num_keys = from.num_keys;
  if (Committed(from) < from.length) {
    fork_notes_.push_back(
        {handle, pages_.next_step(), from.length, from.details->truncations});
  }
  *to.details = *from.details;
  const size_t shared = to.pages().size() - static_cast<size_t>(need);
  for (size_t i = 0; i < shared; ++i) {
    if (to.pages()[i] == kNone) continue;
    pages_.Share(to.pages()[i]);
    pages_.Commit(to.pages()[i]);  // its step may not find it any more
  }
  std::vector<PageCopy> copies;
  for (size_t i = shared; i < to.pages().size(); ++i) {
    // Where the original's own copy is still pending, its page is not written
    // yet: copy from the same source.
    const int32_t source =
        from.pending == kNone
            ? to.pages()[i]
            : pending_[from.pending].copies[i - shared].source;
    pages_.Share(source);
    to.pages()[i] = pages_.Take();
    for (int32_t page : {source, to.pages()[i]}) pages_.Commit(page);
    copies.push_back({source, to.pages()[i]});
  }
  SetTail(to);
  if (partial) AddPending(fork, std::move(copies));
  return fork;
}

Status PagePool::Truncate(SequenceHandle handle, int64_t length) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = FindOpen(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  if (length < 0 || length > seq.length) {
    return InvalidArgument(
        StrCat("length=", length, " must be in range [0, ", seq.length,
               "], the sequence's own length. Truncating never adds tokens."));
  }
  // Nothing to forget: no copy is due, even if a fork waits for the last page.
  if (length == seq.length) return Status();
  for (int64_t group = 0; length > 0 && group < num_groups_; ++group) {
    if (PassedSlots(group, length) < PassedSlots(group, seq.trimmed)) {
      return InvalidArgument(StrCat(
          "length=", length, " needs pages that the sliding window of group ",
          group, " gave back at ", seq.trimmed,
          " tokens. Truncate to 0 and compute the sequence again."));
    }
  }
  const int64_t keep = SlotsFor(length);
  int64_t copies = 0, frees = 0;
  for (size_t i = 0; i < seq.pages().size(); ++i) {
    if (seq.pages()[i] == kNone) continue;
    const int64_t at = static_cast<int64_t>(i) / num_groups_;
    const bool alone = pages_.references(seq.pages()[i]) == 1;
    copies += at == keep - 1 && !IsFull(length) && !alone;
    frees += at >= keep && alone && pages_.num_steps_in_flight() == 0;
  }
  if (copies > pages_.available() + frees) return Short(copies);

  if (keep < SlotsFor(seq.length)) DropPending(seq);  // it is about the last
  NoteTruncation(seq, static_cast<int32_t>(length));
  Shrink(seq, static_cast<int32_t>(length));
  Forget(seq, static_cast<int32_t>(length));
  if (!IsFull(length)) OwnLastSlot(handle, seq);
  return Status();
}

void PagePool::NoteTruncation(Sequence& seq, int32_t length) {
  auto& notes = seq.details->truncations;
  std::erase_if(notes, [&](const SequenceDetails::Truncation& note) {
    return note.length >= length || open_steps_.empty() ||
           note.step <= open_steps_.front();
  });
  if (!open_steps_.empty()) notes.push_back({pages_.next_step(), length});
}

void PagePool::OwnLastSlot(SequenceHandle handle, Sequence& seq) {
  std::vector<PageCopy> copies;
  const auto last = seq.pages().end() - num_groups_;
  for (auto page = last; page != seq.pages().end(); ++page) {
    if (pages_.references(*page) == 1) {
      pages_.MakePrivate(*page);
      continue;
    }
    // The sequence's own reference becomes the pending copy's.
    copies.push_back({*page, pages_.Take()});
    *page = copies.back().target;
    pages_.Commit(*page);  // no step will
  }
  if (copies.empty()) return;
  SetTail(seq);
  AddPending(handle, std::move(copies));
}

void PagePool::AddPending(SequenceHandle handle, std::vector<PageCopy> copies) {
  Sequence& seq = sequences_[SlotOf(handle)];
  seq.pending = static_cast<int32_t>(pending_.size());
  seq.layout = ++layouts_;
  pending_.push_back({handle, std::move(copies)});
}

// The order of copies means nothing: no page is both a source and a target.
void PagePool::DropPending(Sequence& seq) {
  const int32_t index = std::exchange(seq.pending, kNone);
  if (index == kNone) return;
  for (const PageCopy& copy : pending_[index].copies) {
    pages_.Release(copy.source);
  }
  if (pending_[index].handle != pending_.back().handle) {
    pending_[index] = std::move(pending_.back());
    sequences_[SlotOf(pending_[index].handle)].pending = index;
  }
  pending_.pop_back();
}

std::vector<PageCopy> PagePool::TakePageCopies() {
  std::lock_guard lock(mutex_);
  std::vector<PageCopy> copies;
  for (const PendingCopy& pending : pending_) {
    copies.insert(copies.end(), pending.copies.begin(), pending.copies.end());
    sequences_[SlotOf(pending.handle)].pending = kNone;
  }
  for (const PageCopy& copy : copies) pages_.Release(copy.source);
  pending_.clear();
  return copies;
}

// ------------------------------------------------------------------- looking

Result<int64_t> PagePool::Length(SequenceHandle handle) const {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  return int64_t{sequences_[slot].length};
}

Result<int64_t> PagePool::CommittedLength(SequenceHandle handle) const {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  return int64_t{Committed(sequences_[slot])};
}

Result<std::vector<int32_t>> PagePool::PagesOf(SequenceHandle handle,
                                               int64_t group) const {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  if (group < 0 || group >= num_groups_) {
    return InvalidArgument(StrCat("group=", group, " must be in range [0, ",
                                  num_groups_, "), the pool's KV groups."));
  }
  const Sequence& seq = sequences_[slot];
  std::vector<int32_t> pages;
  for (size_t i = group; i < seq.pages().size(); i += num_groups_) {
    pages.push_back(seq.pages()[i]);
  }
  return pages;
}

Status PagePool::CheckPage(int64_t page) const {
  if (page >= 0 && page < total_num_pages()) return Status();
  return InvalidArgument(
      StrCat("page=", page, " must be in range [0, ", total_num_pages(), ")."));
}

Result<int32_t> PagePool::ReferenceCount(int64_t page) const {
  if (Status status = CheckPage(page); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  return pages_.references(static_cast<int32_t>(page));
}

Result<PageState> PagePool::StateOf(int64_t page) const {
  if (Status status = CheckPage(page); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  return pages_.state(static_cast<int32_t>(page));
}

int64_t PagePool::num_free_pages() const {
  std::lock_guard lock(mutex_);
  return pages_.count(PageState::kFree);
}

int64_t PagePool::num_available_pages() const {
  std::lock_guard lock(mutex_);
  return pages_.available();
}

int64_t PagePool::num_sequences() const {
  std::lock_guard lock(mutex_);
  return num_open_;
}

PagePoolStats PagePool::Stats() const {
  std::lock_guard lock(mutex_);
  PagePoolStats stats{.sequences = num_open_,
                      .steps_in_flight = pages_.num_steps_in_flight(),
                      .looked_up_tokens = looked_up_tokens_,
                      .hit_tokens = hit_tokens_,
                      .evictions = pages_.num_evictions()};
  for (size_t state = 0; state < kNumPageStates; ++state) {
    stats.pages[state] = pages_.count(static_cast<PageState>(state));
  }
  for (const Sequence& seq : sequences_) {
    if (seq.pages().empty()) continue;
    for (int64_t group = 0; group < num_groups_; ++group) {
      const int64_t passed = PassedSlots(group, seq.trimmed);
      stats.held_slots += (SlotsFor(seq.length) - passed) * page_size();
      stats.held_tokens += seq.length - passed * page_size();
    }
  }
  return stats;
}

int64_t PagePool::ClearCache() {
  std::lock_guard lock(mutex_);
  return pages_.EvictAll();
}

std::vector<PageEvent> PagePool::TakeEvents(int64_t* dropped) {
  std::lock_guard lock(mutex_);
  return pages_.TakeEvents(dropped);
}

Status PagePool::Audit() const {
  std::lock_guard lock(mutex_);
  std::vector<int32_t> holders(total_num_pages(), 0), lists(holders);
  for (const PendingCopy& pending : pending_) {
    for (const PageCopy& copy : pending.copies) ++holders[copy.source];
  }
  for (const Sequence& seq : sequences_) {
    const bool swapped = seq.state == SequenceState::kSwappedOut;
    if (static_cast<int64_t>(seq.pages().size()) !=
        (swapped ? 0 : SlotsFor(seq.length) * num_groups_)) {
      return Internal("a sequence's pages do not match its length");
    }
    if (seq.state == SequenceState::kClosed && !seq.pages().empty()) {
      return Internal("a closed sequence holds pages");
    }
    for (int32_t page : seq.pages()) {
      if (page == kNone) continue;
      ++holders[page];
      ++lists[page];
    }
  }
  for (const Sequence& seq : sequences_) {
    if (IsFull(seq.length) || seq.pages().empty()) continue;
    for (auto page = seq.pages().end() - num_groups_; page != seq.pages().end();
         ++page) {
      if (lists[*page] != 1 || pages_.state(*page) == PageState::kPublished) {
        return Internal("a partly filled page is shared");
      }
    }
  }
  const std::string_view wrong = pages_.Audit(holders);
  return wrong.empty() ? Status() : Internal(std::string(wrong));
}

}  // namespace pagemill
