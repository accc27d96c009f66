// PagePool: who holds which page of a KV cache.
//
// A sequence is a list of pages and a length in tokens; it has
// ceil(length / page_size) pages.  Full pages may be shared.  Invariants, which
// Audit() counts anew:
//   - a page's reference count is the number of sequences that hold it plus the
//     number of pending copies from it; free pages have count 0;
//   - a partly filled last page is held by one sequence only, so that appending
//     never writes a page that another sequence reads.
// To keep the second, Fork and Truncate give a sequence a new page where the
// last one would be shared and partly filled, and record a pending copy.
//
// A call that fails changes nothing.  Every call costs O(pages touched).
// Thread-safe: one mutex.
#ifndef PAGEMILL_CSRC_CORE_PAGE_POOL_H_
#define PAGEMILL_CSRC_CORE_PAGE_POOL_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "csrc/core/status.h"

namespace pagemill {

// slot | generation << 32.  A closed sequence's handle is never valid again.
using SequenceHandle = int64_t;

struct PageCopy {
  int32_t source;
  int32_t target;
};

class PagePool {
 public:
  static Result<std::unique_ptr<PagePool>> Create(int64_t total_num_pages,
                                                  int64_t page_size);

  SequenceHandle Open();
  Status Close(SequenceHandle handle);
  Result<SequenceHandle> Fork(SequenceHandle handle);
  Status Truncate(SequenceHandle handle, int64_t length);

  Result<int64_t> Length(SequenceHandle handle) const;
  Result<std::vector<int32_t>> Pages(SequenceHandle handle) const;
  Result<int32_t> ReferenceCount(int64_t page) const;

  // Copies to make before the sequences that need them may append.
  std::vector<PageCopy> TakePageCopies();

  // A sequence after an append, valid inside the visitor only.
  struct Appended {
    std::span<const int32_t> pages;
    int64_t length;
  };

  // Appends counts[i] >= 1 tokens to handles[i], all or none, and hands each
  // sequence to visit(i, Appended) while the pool is still locked.
  //   kInvalidArgument: a bad, repeated or copy-pending handle, or a sequence
  //     that would need more than max_pages pages;
  //   kResourceExhausted: too few free pages, with the shortage.
  template <typename Visitor>
  Status Append(std::span<const SequenceHandle> handles,
                std::span<const int64_t> counts, int64_t max_pages,
                Visitor&& visit) {
    std::lock_guard lock(mutex_);
    if (Status status = Extend(handles, counts, max_pages); !status.ok()) {
      return status;
    }
    for (size_t i = 0; i < handles.size(); ++i) {
      const Sequence& seq = sequences_[SlotOf(handles[i])];
      visit(i, Appended{seq.pages, seq.length});
    }
    return Status();
  }

  int64_t total_num_pages() const { return total_num_pages_; }
  int64_t page_size() const { return page_size_; }
  int64_t num_free_pages() const;
  int64_t num_sequences() const;

  // Counts everything anew, in O(total_num_pages).  kInternal: a bug.
  Status Audit() const;

 private:
  struct Sequence {
    uint32_t generation = 1;
    bool open = false;
    uint64_t last_append = 0;  // the append that named it last
    int64_t length = 0;
    std::vector<int32_t> pages;
    int32_t pending = kNone;  // its place in pending_, if a copy is pending
  };
  // Always about a sequence's last page: so there is one at most for each.
  struct PendingCopy {
    SequenceHandle handle;
    PageCopy copy;
  };

  static constexpr int32_t kNone = -1;

  PagePool(int64_t total_num_pages, int64_t page_size);

  static uint32_t SlotOf(SequenceHandle handle) {
    return static_cast<uint32_t>(handle);
  }
  SequenceHandle OpenLocked();
  Status Find(SequenceHandle handle, uint32_t* slot) const;
  Status CheckAppend(std::span<const SequenceHandle> handles,
                     std::span<const int64_t> counts, int64_t max_pages,
                     int64_t* need);
  Status Extend(std::span<const SequenceHandle> handles,
                std::span<const int64_t> counts, int64_t max_pages);
  int32_t TakeFree();
  void Release(int32_t page);
  void AddPending(SequenceHandle handle, PageCopy copy);
  void DropPending(Sequence& seq);
  int64_t PagesFor(int64_t length) const {
    return (length + page_size_ - 1) / page_size_;
  }

  const int64_t total_num_pages_;
  const int64_t page_size_;
  mutable std::mutex mutex_;
  std::vector<int32_t> reference_counts_;
  std::vector<int32_t> free_pages_;  // the next one to hand out is last
  std::vector<Sequence> sequences_;
  std::vector<uint32_t> free_slots_;
  std::vector<PendingCopy> pending_;
  uint64_t appends_ = 0;
  int64_t num_open_ = 0;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PAGE_POOL_H_
