// PagePool: who holds which page of a KV cache, and which pages may be reused.
//
// A sequence is a length in tokens and, for each KV group, a page for each of
// ceil(length / page_size) slots.  Groups are layers with the same needs: those
// of full attention keep every page, those of a sliding window give back what
// the window has passed.  All groups draw from the same pages.
//
// A step gives sequences room for new tokens.  It commits, once its writes are
// certain to come before what is launched next, or aborts, as a whole.  Only
// full pages of committed tokens are published: found by the chained digest of
// all tokens up to their end, shared, and read-only from then on.  What is
// released while a step is in flight is handed out again only after that step
// was retired.
//
// Invariants, which Audit() counts anew:
//   - a page's references are the sequences that hold it and the pending copies
//     from it;
//   - a partly filled last page is held by one sequence only and not
//     published, so that appending never writes what another reads.
// To keep the second, Fork and Truncate give a sequence a new page where the
// last one would be shared and partly filled, and record a pending copy.
//
// A call that fails changes nothing.  Every call costs O(pages touched).
// Thread-safe: one mutex.
#ifndef PAGEMILL_CSRC_CORE_POOL_PAGE_POOL_H_
#define PAGEMILL_CSRC_CORE_POOL_PAGE_POOL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "csrc/core/huge_pages.h"
#include "csrc/core/pool/geometry.h"
#include "csrc/core/pool/pages.h"
#include "csrc/core/pool/sequence.h"
#include "csrc/core/status.h"

namespace pagemill {

struct PageCopy {
  int32_t source;
  int32_t target;
};

struct PagePoolOptions {
  int64_t total_num_pages = 0;
  int64_t page_size = 0;
  // One for each KV group: keys that a query sees, itself included; 0 is all.
  std::vector<int64_t> sliding_windows = {0};
  bool prefix_cache = true;
  // What keys are salted with, so that nobody outside can aim for equal ones.
  // Empty: drawn at random.
  std::vector<uint8_t> secret = {};
  int64_t max_events = 0;
};

struct PagePoolStats {
  std::array<int64_t, kNumPageStates> pages{};  // by state
  int64_t sequences = 0;
  int64_t steps_in_flight = 0;
  int64_t held_slots = 0;   // token slots in pages that sequences list
  int64_t held_tokens = 0;  // of them, those that hold a token
  int64_t looked_up_tokens = 0;
  int64_t hit_tokens = 0;
  int64_t evictions = 0;
};

class PagePool {
 public:
  static Result<std::unique_ptr<PagePool>> Create(PagePoolOptions options);

  // ---- sequences (page_pool.cc)

  struct Opened {
    SequenceHandle handle;
    int64_t num_cached_tokens;
  };
  // Looks the longest published prefix up and holds it.  At least one token is
  // left to compute.  Prefixes are shared under the same salt only.
  Opened Open(std::span<const int32_t> tokens, std::span<const uint8_t> salt);
  // How many tokens Open would find, without holding or counting anything.
  int64_t Probe(std::span<const int32_t> tokens,
                std::span<const uint8_t> salt) const;
  Status Close(SequenceHandle handle);
  Result<SequenceHandle> Fork(SequenceHandle handle);
  // Forgets the tokens at and past `length`.
  Status Truncate(SequenceHandle handle, int64_t length);
  // Tells the ids of the tokens that follow the known ones.
  Status Extend(SequenceHandle handle, std::span<const int32_t> tokens);

  // Gives all pages back; the known tokens are kept.
  Status Preempt(SequenceHandle handle);
  // Looks the known tokens up again; the length found.  The sequence must hold
  // nothing.
  Result<int64_t> Resume(SequenceHandle handle);

  // Begins to swap out: the pages, [slots, groups], to copy elsewhere.
  Result<std::vector<int32_t>> BeginSwapOut(SequenceHandle handle);
  Status EndSwapOut(SequenceHandle handle);
  // New pages, [slots, groups]; -1 where nothing must be copied back: a window
  // has passed, or the page was found by its key.
  Result<std::vector<int32_t>> SwapIn(SequenceHandle handle);

  Result<int64_t> Length(SequenceHandle handle) const;
  Result<int64_t> CommittedLength(SequenceHandle handle) const;
  Result<std::vector<int32_t>> PagesOf(SequenceHandle handle,
                                       int64_t group) const;

  // Copies to make before the sequences that need them may append.
  std::vector<PageCopy> TakePageCopies();

  // ---- steps (steps.cc)

  // A sequence as a step finds it, valid inside the visitor only.
  struct Placed {
    const Sequence& sequence;

    int32_t length() const { return sequence.length; }
    const int32_t* pages() const { return sequence.pages().data(); }
  };

  // Appends counts[row] >= 1 tokens to handles[row], all or none, and calls
  // visit(row, Placed) for each while the pool is locked; prefetch(row, Placed)
  // some rows before, with the sequence as it was.  Errors name row r as
  // requests[order[r]].
  //   kInvalidArgument: a bad, repeated, swapped out or copy-pending handle,
  //     or a sequence that would need more than max_pages pages;
  //   kResourceExhausted: too few free pages, with the shortage.
  // step.handles, step.counts and room for step.lengths are inputs.
  template <typename Prefetch, typename Visit>
  Status BeginStep(std::span<const int32_t> order, int64_t max_pages,
                   PoolStep& step, Prefetch prefetch, Visit visit) {
    std::lock_guard lock(mutex_);
    if (Status status = CheckRows(order, max_pages, step); !status.ok()) {
      return status;
    }
    step.changed.clear();
    OpenStep(step);
    const size_t rows = step.handles.size();
    const auto sequence = [&](size_t row) -> Sequence& {
      return sequences_[SlotOf(step.handles[row])];
    };
    for (size_t row = 0; row < rows; ++row) {
      // First where a sequence's pages are told, then, once that is there, they
      // themselves.
      if (row + 8 < rows) __builtin_prefetch(sequence(row + 8).details.get());
      if (row + 3 < rows) prefetch(row + 3, Placed{sequence(row + 3)});
      Sequence& seq = sequence(row);
      Place(seq, row, step);
      visit(row, Placed{seq});
    }
    return Status();
  }

  // Whether BeginStep would succeed now: its errors, and nothing is changed.
  Status CheckStep(std::span<const int32_t> order, int64_t max_pages,
                   const PoolStep& step) {
    std::lock_guard lock(mutex_);
    return CheckRows(order, max_pages, step);
  }

  // How a step left its rows' sequences: Sequence::layout and their lengths.
  struct Left {
    const int64_t* layouts;
    const int32_t* lengths;
  };
  // The quick way to append one token to each sequence: for the sequences of a
  // step that succeeded, when nobody has touched them since, no other step is
  // open and there is one KV group without a window.  Writes the last page of
  // each row to tails, then calls finish(placed) while the pool is locked, with
  // placed(row) as above.  False, with nothing changed, when BeginStep must
  // look closer.
  template <typename Finish>
  bool RepeatStep(Left left, int64_t max_pages, PoolStep& step, int32_t* tails,
                  Finish finish) {
    std::lock_guard lock(mutex_);
    if (!AppendOnes(left, max_pages, step, tails)) return false;
    finish([&](size_t row) {
      return Placed{sequences_[SlotOf(step.handles[row])]};
    });
    return true;
  }

  // Keeps the first accepted[row] of each row's tokens, all where `accepted` is
  // empty, and publishes what they fill.
  Status CommitStep(PoolStep& step, std::span<const int32_t> accepted);
  // Takes the step's tokens back.
  Status AbortStep(PoolStep& step);
  // No part of the step reads or writes pages any more.
  Status RetireStep(PoolStep& step);

  // ---- the pool as a whole

  int64_t total_num_pages() const { return pages_.total(); }
  int64_t page_size() const { return geometry_.page_size(); }
  const PageGeometry& geometry() const { return geometry_; }
  int64_t num_groups() const { return num_groups_; }
  bool has_windows() const { return has_windows_; }
  // Slots at the front that no query at or past `length` sees.
  int64_t PassedSlots(int64_t group, int64_t length) const {
    const int64_t passed = length - windows_[group] + 1;
    return windows_[group] == 0 || passed <= 0 ? 0
                                               : geometry_.FullSlots(passed);
  }

  int64_t num_free_pages() const;
  int64_t num_available_pages() const;
  int64_t num_sequences() const;
  PagePoolStats Stats() const;
  Result<int32_t> ReferenceCount(int64_t page) const;
  Result<PageState> StateOf(int64_t page) const;
  // Forgets all published pages that nobody holds; how many they were.
  int64_t ClearCache();
  std::vector<PageEvent> TakeEvents(int64_t* dropped);

  // Counts everything anew, in O(total_num_pages).  kInternal: a bug.
  Status Audit() const;

 private:
  // Always about a sequence's last pages: so there is one at most for each.
  struct PendingCopy {
    SequenceHandle handle;
    std::vector<PageCopy> copies;  // one a group
  };

  // Sequence `from` was forked at `length` tokens, some of open steps, when
  // `step` was the next to begin.  It holds after `from` is closed.
  struct ForkNote {
    SequenceHandle from;
    int64_t step;
    int32_t length;
    std::vector<SequenceDetails::Truncation> truncations;
  };

  static constexpr int32_t kNone = -1;
  static constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

  explicit PagePool(PagePoolOptions options);

  SequenceHandle OpenSlot();
  Status Find(SequenceHandle handle, uint32_t* slot) const;
  Status FindOpen(SequenceHandle handle, uint32_t* slot) const;
  Status CheckPage(int64_t page) const;
  Status Short(int64_t need) const;

  // Frees the slots at and past `keep`, the last first.
  void DropSlots(Sequence& seq, int64_t keep);
  void TakeSlots(Sequence& seq, int64_t slots);
  void Shrink(Sequence& seq, int32_t length);
  // Of what open steps brought, nothing at and past `length` is left.
  void NoteTruncation(Sequence& seq, int32_t length);
  // Before a partly filled last slot is written: copies of shared pages.
  void OwnLastSlot(SequenceHandle handle, Sequence& seq);
  void AddPending(SequenceHandle handle, std::vector<PageCopy> copies);
  void DropPending(Sequence& seq);

  // prefix.cc
  std::unique_ptr<SequenceDetails> Describe(
      std::span<const int32_t> tokens, std::span<const uint8_t> salt) const;
  void Learn(SequenceDetails& details, std::span<const int32_t> tokens) const;
  int64_t FindPrefix(const SequenceDetails& details) const;
  void Attach(Sequence& seq, int64_t slots);
  int64_t AttachPrefix(Sequence& seq);
  void Publish(Sequence& seq);
  void Forget(Sequence& seq, int32_t length);
  void Trim(Sequence& seq);

  // steps.cc
  Status CheckRows(std::span<const int32_t> order, int64_t max_pages,
                   const PoolStep& step);
  Status Explain(const PoolStep& step, size_t row, int32_t request,
                 int64_t max_pages, bool twice) const;
  void OpenStep(PoolStep& step);
  void Place(Sequence& seq, size_t row, PoolStep& step);
  bool AppendOnes(Left left, int64_t max_pages, PoolStep& step, int32_t* tails);
  void TakeForOnes(const PoolStep& step, int32_t* tails);
  void UndoOnes(const PoolStep& step, size_t rows);
  Status CheckUndo(const PoolStep& step, size_t row, int32_t kept,
                   const char* what);
  bool CommitTail(const PoolStep& step, size_t row);
  void CommitRow(const PoolStep& step, size_t row, int32_t kept);
  // Where the step's tokens that are left end.
  static int32_t EndOf(
      const PoolStep& step, size_t row,
      const std::vector<SequenceDetails::Truncation>& truncations);
  // Where the row's tokens end that a fork took over.
  int32_t ForkedTo(const PoolStep& step, size_t row) const;
  void EndStep(PoolStep& step);
  // Tokens of committed steps.  Sequences are not visited when a step commits:
  // until it and those before it are closed, `committed` holds what is known.
  int32_t Committed(const Sequence& seq) const {
    const bool waits =
        !open_steps_.empty() && open_steps_.front() <= seq.last_step;
    return waits ? seq.committed : seq.length;
  }

  // The sequence if it is open, else null.
  Sequence* Alive(SequenceHandle handle) {
    const uint32_t slot = SlotOf(handle);
    if (slot >= sequences_.size()) return nullptr;
    Sequence& seq = sequences_[slot];
    return IsAlive(seq, handle) ? &seq : nullptr;
  }
  static bool IsAlive(const Sequence& seq, SequenceHandle handle) {
    return static_cast<int64_t>(seq.generation) == handle >> 32 &&
           seq.state == SequenceState::kOpen;
  }
  bool MayWriteLastPages(const Sequence& seq) const;
  void SetTail(Sequence& seq) const {
    seq.tail = seq.pages().empty() ? kNone : *(seq.pages().end() - num_groups_);
  }

  int64_t SlotsFor(int64_t length) const { return geometry_.SlotsFor(length); }
  int64_t FullSlots(int64_t length) const {
    return geometry_.FullSlots(length);
  }
  bool IsFull(int64_t length) const { return geometry_.IsFull(length); }

  const PageGeometry geometry_;
  const std::vector<int64_t> windows_;
  const int64_t num_groups_;
  const bool has_windows_;
  const bool prefix_cache_;
  const std::vector<uint8_t> secret_;

  mutable std::mutex mutex_;
  Pages pages_;
  mutable ListMemory lists_;
  std::vector<Sequence> sequences_;
  std::vector<uint32_t> free_slots_;
  std::vector<PendingCopy> pending_;
  uint32_t checks_ = 0;
  int64_t layouts_ = 0;
  std::vector<int64_t> open_steps_;   // ascending
  std::vector<ForkNote> fork_notes_;  // of open steps only
  int64_t num_open_ = 0;
  int64_t looked_up_tokens_ = 0, hit_tokens_ = 0;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_POOL_PAGE_POOL_H_
