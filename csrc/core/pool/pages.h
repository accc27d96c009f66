// Pages: the state of every page of a cache, and the index of published ones.
//
//   free --Take--> reserved --Commit--> written --Publish--> published
//    ^                 \                   \                    |    ^
//    |                  `------ Release ----'           Release |    | Share
//    |                             |                            v    |
//    +--------- Retire -------- fenced ------- Retire -----> evictable
//    ^                                                           |
//    '----------------------------- Take (evicts) ---------------'
//
// Forget leaves an evictable page evictable, without a key; sharing it makes it
// written.  A page whose last holder lets go while a step that may read or
// write it is in flight is fenced until that step is retired; otherwise it is
// free, or evictable when it is published.  Eviction takes what was released
// first.
//
// 32 bytes a page, of which the pages that were never used touch none.
// Not thread-safe; every call is O(1) but for the walk of one index bucket.
#ifndef PAGEMILL_CSRC_CORE_POOL_PAGES_H_
#define PAGEMILL_CSRC_CORE_POOL_PAGES_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "csrc/core/huge_pages.h"

namespace pagemill {

enum class PageState : uint32_t {
  kFree,
  kReserved,   // held by a step that has not committed
  kWritten,    // held by one sequence
  kPublished,  // full, read-only, found by its key
  kEvictable,  // published, held by nobody
  kFenced,     // held by nobody but a step in flight
};
inline constexpr size_t kNumPageStates = 6;

// Identifies a page's content: what a digest of it and of all before it begins
// with.  Zero is no key.
struct PageKey {
  uint64_t high = 0;
  uint64_t low = 0;

  friend bool operator==(const PageKey&, const PageKey&) = default;
  explicit operator bool() const { return (high | low) != 0; }
};

struct PageEvent {
  enum Kind : int32_t { kPublished, kEvicted };
  Kind kind;
  int32_t page;
  PageKey key;
};

// Zeros that cost nothing until they are touched.
template <typename T>
class ZeroedArray {
 public:
  explicit ZeroedArray(size_t size)
      : data_(static_cast<T*>(std::calloc(size, sizeof(T)))) {
    if (data_ == nullptr && size > 0) throw std::bad_alloc();
    AdviseHuge(data_.get(), size * sizeof(T));
  }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  const T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
};

class Pages {
 public:
  // Page ids and counts share a word with the state.
  static constexpr int64_t kMaxPages = (int64_t{1} << 29) - 1;
  static constexpr int32_t kNone = -1;

  // 0 < total <= kMaxPages.  Without an index nothing can be published.
  // `duplicates`: for PublishBehind.
  Pages(int64_t total, bool index, size_t max_events, bool duplicates = false);

  int64_t total() const { return total_; }
  int64_t count(PageState state) const {
    return counts_[static_cast<size_t>(state)];
  }
  // Pages that Take can give.
  int64_t available() const {
    return count(PageState::kFree) + count(PageState::kEvictable);
  }
  PageState state(int32_t page) const {
    return static_cast<PageState>(records_[page].state);
  }
  // How many hold the page.
  int32_t references(int32_t page) const {
    return IsHeld(state(page)) ? static_cast<int32_t>(records_[page].count) : 0;
  }
  // Published or evictable, or fenced and one of these before; not forgotten.
  bool HasKey(int32_t page) const {
    return indexed_ && static_cast<bool>(key(page));
  }
  // Held once and not published: its holder may write it.
  bool IsPrivate(int32_t page) const { return privacy()(page); }

  // A reserved page held once.  available() > 0.
  int32_t Take() {
    int32_t page = free_head_;
    if (page != kNone) {
      free_head_ = records_[page].next;
    } else if (fresh_ < total_) {
      page = static_cast<int32_t>(fresh_++);
    } else {
      page = EvictOldest();
    }
    --counts_[static_cast<size_t>(PageState::kFree)];
    ++counts_[static_cast<size_t>(PageState::kReserved)];
    records_[page] = {static_cast<uint32_t>(PageState::kReserved), 1, kNone};
    return page;
  }

  // One more holder of a page that is held, evictable or fenced.
  void Share(int32_t page);

  // One holder less.
  void Release(int32_t page) {
    if (--records_[page].count == 0) LetGo(page);
  }

  // The step that reserved the page has committed.
  void Commit(int32_t page) {
    if (state(page) == PageState::kReserved) Move(page, PageState::kWritten);
  }

  // Lets others find the page, unless one with the same key is there already.
  bool Publish(int32_t page, PageKey key);
  // Lets others find the page once those with the same key are gone; for pages
  // with duplicates.
  void PublishBehind(int32_t page, PageKey key);

  // The page has one holder, who will write it: nobody finds it any more.
  void MakePrivate(int32_t page) {
    if (state(page) != PageState::kPublished) return;
    Unpublish(page);
    Move(page, PageState::kWritten);
  }

  // The page with that key, or kNone.
  int32_t Lookup(PageKey key) const {
    int32_t link = heads_[Bucket(key)];
    while (link != 0 && entries_[link - 1].key() != key) {
      link = entries_[link - 1].link;
    }
    return link - 1;
  }
  // What the page's own calls read; any number does.
  void Prefetch(int32_t page) const {
    __builtin_prefetch(records_.data() + page, 1);
    __builtin_prefetch(entries_.data() + page, 1);
  }
  // Fetches what a later Lookup or Publish will read: first where the bucket
  // begins, then, once that is there, the bucket's first page.
  void PrefetchBucket(PageKey key) const {
    __builtin_prefetch(&heads_[Bucket(key)]);
  }
  void PrefetchEntry(PageKey key) const {
    const int32_t link = heads_[Bucket(key)];
    if (link != 0) __builtin_prefetch(&entries_[link - 1]);
  }

  // Steps have ascending ids.
  int64_t BeginStep();
  int64_t next_step() const { return next_step_; }
  // False for a step that is not in flight.
  bool RetireStep(int64_t step);
  int64_t num_steps_in_flight() const {
    return static_cast<int64_t>(in_flight_.size());
  }

  // Nobody finds a published or evictable page any more; held by nobody, it
  // keeps its place in the order of eviction.
  void Forget(int32_t page);
  // Forgets every page that nobody holds.
  void ForgetEvictable();
  // Published pages held by nobody become free; returns how many.
  int64_t EvictAll();
  int64_t num_evictions() const { return num_evictions_; }

  // What happened since the last call, the oldest first; and how many events
  // there was no room for.
  std::vector<PageEvent> TakeEvents(int64_t* dropped);

  // Empty, or what is wrong: holders[p] are the holders as counted anew.
  const char* Audit(const std::vector<int32_t>& holders) const;

 private:
  struct Record {
    uint32_t state : 3;
    uint32_t count : 29;  // held: holders; evictable: the page released before
    int32_t next;         // free, evictable: the next one; fenced: its ticket
  };
  // What the index knows of a page: on one cache line, mostly.
  struct Entry {
    std::array<uint32_t, 4> words;
    int32_t link;  // page + 1 of the next in the bucket, or 0

    PageKey key() const {
      return {words[0] | uint64_t{words[1]} << 32,
              words[2] | uint64_t{words[3]} << 32};
    }
    void set_key(PageKey key) {
      words = {static_cast<uint32_t>(key.high),
               static_cast<uint32_t>(key.high >> 32),
               static_cast<uint32_t>(key.low),
               static_cast<uint32_t>(key.low >> 32)};
    }
  };
  struct Fence {
    int64_t step;
    int32_t page;
    int32_t ticket;
  };

 public:
  // IsPrivate for hot loops.
  class Privacy {
   public:
    bool operator()(int32_t page) const {
      static_assert(static_cast<uint32_t>(PageState::kReserved) == 1 &&
                    static_cast<uint32_t>(PageState::kWritten) == 2);
      // Both bit fields at once: the count, 1, above the state, 1 or 2.
      const uint32_t word =
          std::bit_cast<std::array<uint32_t, 2>>(records_[page])[0];
      return word - 9 <= 1;
    }

   private:
    friend class Pages;
    explicit Privacy(const Record* records) : records_(records) {}
    const Record* records_;
  };
  Privacy privacy() const { return Privacy(records_.data()); }

 private:
  static constexpr uint32_t kNull = (uint32_t{1} << 29) - 1;

  static bool IsHeld(PageState state) {
    return state == PageState::kReserved || state == PageState::kWritten ||
           state == PageState::kPublished;
  }
  size_t Bucket(PageKey key) const {
    return static_cast<size_t>(
        static_cast<unsigned __int128>(key.low) * buckets_ >> 64);
  }

  PageKey key(int32_t page) const { return entries_[page].key(); }

  void Enter(int32_t page, PageState state) {
    records_[page].state = static_cast<uint32_t>(state);
    ++counts_[static_cast<size_t>(state)];
  }
  void Move(int32_t page, PageState to) {
    --counts_[records_[page].state];
    Enter(page, to);
  }
  void LetGo(int32_t page) {
    if (!in_flight_.empty()) {
      AddFence(page);
    } else if (state(page) == PageState::kPublished) {
      AppendEvictable(page);
    } else {
      Free(page);
    }
  }
  void Free(int32_t page) {
    Move(page, PageState::kFree);
    records_[page].next = free_head_;
    free_head_ = page;
  }
  void AddFence(int32_t page);
  void LiftFences();
  void Lift(const Fence& fence);
  void AppendEvictable(int32_t page);
  void RemoveEvictable(int32_t page);
  int32_t EvictOldest();
  void PrefetchOldest() const;
  // Enters the page at the end of its key's bucket.
  void Index(int32_t page, PageKey key, int32_t* end);
  void Unpublish(int32_t page);
  bool IsIndexed(int32_t page) const;
  void Log(PageEvent::Kind kind, int32_t page);

  const int64_t total_;
  const bool indexed_;
  const uint64_t buckets_;
  ZeroedArray<Record> records_;
  ZeroedArray<Entry> entries_;
  ZeroedArray<int32_t> heads_;  // page + 1 of the first in the bucket, or 0
  const bool duplicates_;
  ZeroedArray<int32_t> ends_;  // with duplicates, page + 1 of the last
  std::array<int64_t, kNumPageStates> counts_{};
  int64_t fresh_ = 0;  // pages from here on were never taken
  int32_t free_head_ = kNone;
  int32_t oldest_ = kNone, newest_ = kNone;  // evictable pages
  std::vector<Fence> fences_;  // from first_fence_ on, by ascending steps
  size_t first_fence_ = 0;
  uint32_t tickets_ = 0;  // may wrap: a page's last one tells
  int64_t next_step_ = 0;
  std::vector<int64_t> in_flight_;  // ascending
  int64_t num_evictions_ = 0;
  const size_t max_events_;
  std::vector<PageEvent> events_;
  int64_t dropped_events_ = 0;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_POOL_PAGES_H_
