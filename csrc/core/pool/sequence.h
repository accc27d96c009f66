// Sequence: a request's place in a pool.
#ifndef PAGEMILL_CSRC_CORE_POOL_SEQUENCE_H_
#define PAGEMILL_CSRC_CORE_POOL_SEQUENCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <vector>

#include "csrc/core/sha256.h"

namespace pagemill {

// slot | generation << 32.  A closed sequence's handle is never valid again.
using SequenceHandle = int64_t;

inline uint32_t SlotOf(SequenceHandle handle) {
  return static_cast<uint32_t>(handle);
}

enum class SequenceState : uint8_t {
  kClosed,
  kOpen,
  kSwappingOut,  // its pages are being copied elsewhere
  kSwappedOut,   // it has a length and no pages
};

using PageList = std::pmr::vector<int32_t>;

// What steps rarely touch.
struct SequenceDetails {
  explicit SequenceDetails(std::pmr::memory_resource* lists) : pages(lists) {}

  // [slots, groups]; -1 where a window has passed.
  PageList pages;
  Sha256Digest root{};              // before the first page
  std::vector<Sha256Digest> chain;  // after each page of known tokens
  std::vector<int32_t> tokens;      // the known ones, from the first on
  // Of steps begun before `step`, nothing at and past `length` is left.
  struct Truncation {
    int64_t step;
    int32_t length;
  };
  std::vector<Truncation> truncations;  // both ascend; of open steps only

  void Clear() {
    // Long lists give their memory back.
    constexpr size_t kKept = 1024;
    const auto clear = [](auto& list) {
      list.clear();
      if (list.capacity() > kKept) list.shrink_to_fit();
    };
    clear(pages);
    clear(chain);
    clear(tokens);
    clear(truncations);
  }
};

// What every step touches, on one cache line.
struct alignas(64) Sequence {
  uint32_t generation = 1;
  SequenceState state = SequenceState::kClosed;
  uint32_t mark = 0;      // the last CheckRows that named it
  int32_t length = 0;     // tokens that have a place
  int32_t committed = 0;  // of them, those committed; see PagePool::Committed
  int32_t tail = -1;      // the last page of the first group
  int32_t trimmed = 0;    // the committed length that windows were cut for
  int32_t published = 0;  // page slots dealt with by publishing
  int32_t num_keys = 0;   // page slots whose tokens are known
  int32_t pending = -1;   // its pending copy, if there is one
  // Of this sequence alone, and another one once anything but appending was
  // done to it: who finds it unchanged need not look further.
  int64_t layout = 0;
  // The last step that appended to it; -1 where all its tokens are committed.
  int64_t last_step = -1;
  std::unique_ptr<SequenceDetails> details = nullptr;

  PageList& pages() { return details->pages; }
  const PageList& pages() const { return details->pages; }
};

// A planned step, as the pool needs it to commit or abort.
struct PoolStep {
  int64_t id = -1;
  bool open = false;       // neither committed nor aborted
  bool in_flight = false;  // not retired
  // By row.
  std::vector<SequenceHandle> handles;
  std::vector<int32_t> counts;  // tokens added
  int32_t* lengths = nullptr;   // after the step; memory of the caller's
  // Rows that took or filled a page.
  std::vector<int32_t> changed;

  int32_t before(size_t row) const { return lengths[row] - counts[row]; }
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_POOL_SEQUENCE_H_
