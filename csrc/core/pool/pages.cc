#include "csrc/core/pool/pages.h"

#include <algorithm>
#include <utility>

namespace pagemill {

Pages::Pages(int64_t total, bool index, size_t max_events, bool duplicates)
    : total_(total),
      indexed_(index),
      buckets_(index ? static_cast<uint64_t>(total) : 1),
      records_(total),
      entries_(index ? total : 1),
      heads_(buckets_),
      duplicates_(index && duplicates),
      ends_(duplicates_ ? total : 1),
      max_events_(max_events) {
  counts_[static_cast<size_t>(PageState::kFree)] = total;
}

void Pages::Share(int32_t page) {
  switch (state(page)) {
    case PageState::kEvictable:
      RemoveEvictable(page);
      [[fallthrough]];
    case PageState::kFenced:  // its fence finds another ticket, or none
      Move(page, HasKey(page) ? PageState::kPublished : PageState::kWritten);
      records_[page].count = 1;
      return;
    default:
      ++records_[page].count;
  }
}

bool Pages::Publish(int32_t page, PageKey key) {
  const size_t bucket = Bucket(key);
  // At the end of the bucket, which must be walked anyway: what is evicted, the
  // oldest, is then found at its beginning.
  int32_t* link = &heads_[bucket];
  for (; *link != 0; link = &entries_[*link - 1].link) {
    if (entries_[*link - 1].key() == key) return false;
  }
  Index(page, key, link);
  if (duplicates_) ends_[bucket] = page + 1;
  return true;
}

void Pages::PublishBehind(int32_t page, PageKey key) {
  const size_t bucket = Bucket(key);
  const bool empty = heads_[bucket] == 0;
  Index(page, key, empty ? &heads_[bucket] : &entries_[ends_[bucket] - 1].link);
  ends_[bucket] = page + 1;
}

void Pages::Index(int32_t page, PageKey key, int32_t* end) {
  *end = page + 1;
  entries_[page].set_key(key);
  entries_[page].link = 0;
  Move(page, PageState::kPublished);
  Log(PageEvent::kPublished, page);
}

bool Pages::IsIndexed(int32_t page) const {
  int32_t link = heads_[Bucket(key(page))];
  while (link != 0 && link != page + 1) link = entries_[link - 1].link;
  return link != 0;
}

void Pages::Unpublish(int32_t page) {
  const size_t bucket = Bucket(key(page));
  int32_t before = 0;
  int32_t* link = &heads_[bucket];
  while (*link != page + 1) {
    before = *link;
    link = &entries_[before - 1].link;
  }
  *link = entries_[page].link;
  if (duplicates_ && *link == 0) ends_[bucket] = before;
  Log(PageEvent::kEvicted, page);
  entries_[page].set_key(PageKey());
  ++num_evictions_;
}

// ------------------------------------------------------------------ eviction

void Pages::AppendEvictable(int32_t page) {
  Move(page, PageState::kEvictable);
  Record& record = records_[page];
  record.count = newest_ == kNone ? kNull : static_cast<uint32_t>(newest_);
  record.next = kNone;
  (newest_ == kNone ? oldest_ : records_[newest_].next) = page;
  newest_ = page;
}

void Pages::RemoveEvictable(int32_t page) {
  const Record record = records_[page];
  if (record.count == kNull) {
    oldest_ = record.next;
  } else {
    records_[record.count].next = record.next;
  }
  if (record.next == kNone) {
    newest_ =
        record.count == kNull ? kNone : static_cast<int32_t>(record.count);
  } else {
    records_[record.next].count = record.count;
  }
}

// Evictions come in a row, each with accesses to anywhere in the index.
void Pages::PrefetchOldest() const {
  int32_t page = oldest_;
  for (int ahead = 0; page != kNone && ahead < 8; ++ahead) {
    if (ahead == 4) PrefetchBucket(key(page));
    page = records_[page].next;
  }
  if (page != kNone) __builtin_prefetch(&entries_[page]);
}

int32_t Pages::EvictOldest() {
  const int32_t page = oldest_;
  RemoveEvictable(page);
  if (indexed_) PrefetchOldest();
  if (HasKey(page)) Unpublish(page);
  Move(page, PageState::kFree);
  return page;
}

void Pages::Forget(int32_t page) {
  if (HasKey(page)) Unpublish(page);
  if (state(page) == PageState::kPublished) Move(page, PageState::kWritten);
}

void Pages::ForgetEvictable() {
  for (int32_t p = oldest_; p != kNone; p = records_[p].next) Forget(p);
}

int64_t Pages::EvictAll() {
  int64_t evicted = 0;
  for (; oldest_ != kNone; ++evicted) Free(EvictOldest());
  return evicted;
}

// -------------------------------------------------------------------- fences

void Pages::AddFence(int32_t page) {
  Move(page, PageState::kFenced);
  const int32_t ticket = static_cast<int32_t>(++tickets_);
  records_[page].next = ticket;
  fences_.push_back({next_step_ - 1, page, ticket});
}

int64_t Pages::BeginStep() {
  in_flight_.push_back(next_step_);
  return next_step_++;
}

bool Pages::RetireStep(int64_t step) {
  const auto place =
      std::lower_bound(in_flight_.begin(), in_flight_.end(), step);
  if (place == in_flight_.end() || *place != step) return false;
  in_flight_.erase(place);
  LiftFences();
  return true;
}

void Pages::LiftFences() {
  const int64_t oldest = in_flight_.empty() ? next_step_ : in_flight_.front();
  while (first_fence_ < fences_.size() && fences_[first_fence_].step < oldest) {
    Lift(fences_[first_fence_++]);
  }
  if (2 * first_fence_ < fences_.size()) return;
  fences_.erase(fences_.begin(),
                fences_.begin() + static_cast<std::ptrdiff_t>(first_fence_));
  first_fence_ = 0;
}

void Pages::Lift(const Fence& fence) {
  const int32_t page = fence.page;
  // Shared again, or fenced anew, since.
  if (state(page) != PageState::kFenced ||
      records_[page].next != fence.ticket) {
    return;
  }
  if (HasKey(page)) {
    AppendEvictable(page);
  } else {
    Free(page);
  }
}

// ----------------------------------------------------------- events and audit

void Pages::Log(PageEvent::Kind kind, int32_t page) {
  if (events_.size() < max_events_) {
    events_.push_back({kind, page, key(page)});
  } else if (max_events_ > 0) {
    ++dropped_events_;
  }
}

std::vector<PageEvent> Pages::TakeEvents(int64_t* dropped) {
  *dropped = std::exchange(dropped_events_, 0);
  return std::exchange(events_, {});
}

const char* Pages::Audit(const std::vector<int32_t>& holders) const {
  std::array<int64_t, kNumPageStates> counts{};
  for (int32_t page = 0; page < total_; ++page) {
    ++counts[records_[page].state];
    if (references(page) != holders[page]) return "reference counts drifted";
    if (state(page) == PageState::kPublished && !HasKey(page)) {
      return "a published page has no key";
    }
    if (HasKey(page) && !IsIndexed(page)) {
      return "a published page is missing from the index";
    }
  }
  if (counts != counts_) return "the counts of page states drifted";
  int64_t free = total_ - fresh_, evictable = 0;
  for (int32_t p = free_head_; p != kNone; p = records_[p].next) {
    if (state(p) != PageState::kFree || ++free > total_) {
      return "the free list is broken";
    }
  }
  for (int32_t p = oldest_; p != kNone; p = records_[p].next) {
    if (state(p) != PageState::kEvictable || ++evictable > total_) {
      return "the list of evictable pages is broken";
    }
  }
  if (free != count(PageState::kFree) ||
      evictable != count(PageState::kEvictable)) {
    return "pages are missing from their lists";
  }
  return "";
}

}  // namespace pagemill
