// Prefix reuse and swapping of a PagePool.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <utility>

#include "csrc/core/pool/page_pool.h"
#include "csrc/core/prefix_key.h"
#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

// Groups hold different values of the same tokens.
PageKey KeyOf(const Sha256Digest& digest, int64_t group) {
  PageKey key;
  std::memcpy(&key, digest.data(), sizeof(key));
  key.low ^= static_cast<uint64_t>(group);
  return key;
}

constexpr int64_t kPagesAhead = 6;

// Fetches what the index needs for a sequence's keys, ahead of a loop over
// them.
class KeysAhead {
 public:
  KeysAhead(const Pages& pages, const SequenceDetails& details, int64_t group,
            int64_t begin, int64_t end)
      : pages_(pages),
        chain_(details.chain),
        group_(group),
        begin_(begin),
        end_(end),
        slot_(begin - kBucket) {
    while (slot_ < begin) Next();
  }

  void Next() {
    if (slot_ + kBucket < end_) pages_.PrefetchBucket(Key(slot_ + kBucket));
    const int64_t entry = slot_ + kEntry;
    if (entry >= begin_ && entry < end_) pages_.PrefetchEntry(Key(entry));
    ++slot_;
  }

 private:
  static constexpr int64_t kBucket = 12, kEntry = 6;

  PageKey Key(int64_t slot) const { return KeyOf(chain_[slot], group_); }

  const Pages& pages_;
  const std::vector<Sha256Digest>& chain_;
  const int64_t group_, begin_, end_;
  int64_t slot_;
};

}  // namespace

std::unique_ptr<SequenceDetails> PagePool::Describe(
    std::span<const int32_t> tokens, std::span<const uint8_t> salt) const {
  auto details = std::make_unique<SequenceDetails>(lists_.resource());
  if (!prefix_cache_) return details;
  details->root = PrefixChain(secret_, salt, page_size()).Root();
  Learn(*details, tokens);
  return details;
}

void PagePool::Learn(SequenceDetails& details,
                     std::span<const int32_t> tokens) const {
  details.tokens.insert(details.tokens.end(), tokens.begin(), tokens.end());
  const size_t had = details.chain.size();
  const size_t full = static_cast<size_t>(
      FullSlots(static_cast<int64_t>(details.tokens.size())));
  if (full == had) return;
  details.chain.resize(full);
  PrefixChain::ExtendMany(
      had == 0 ? details.root : details.chain[had - 1],
      std::span(details.tokens)
          .subspan(had * page_size(), (full - had) * page_size()),
      page_size(), details.chain.data() + had);
}

// The longest prefix, in slots, of which every group has what a next query
// sees.
int64_t PagePool::FindPrefix(const SequenceDetails& details) const {
  const int64_t tokens = static_cast<int64_t>(details.tokens.size());
  if (!prefix_cache_ || tokens == 0) return 0;
  // One token at least must be computed, for its logits.
  const int64_t limit = (tokens - 1) / page_size();
  const auto found = [&](int64_t slot, int64_t group) {
    return pages_.Lookup(KeyOf(details.chain[slot], group)) != kNone;
  };
  int64_t hit = limit;
  for (int64_t group = 0; group < num_groups_; ++group) {
    if (windows_[group] != 0) continue;
    KeysAhead ahead(pages_, details, group, 0, hit);
    int64_t slot = 0;
    for (; slot < hit && found(slot, group); ++slot) {
      ahead.Next();
    }
    hit = slot;
  }
  for (int64_t group = 0; group < num_groups_; ++group) {
    if (windows_[group] == 0) continue;
    int64_t slot = hit;
    while (slot > PassedSlots(group, hit * page_size())) {
      if (found(--slot, group)) continue;
      hit = slot;  // shorter: every window begins earlier
      group = -1;
      break;
    }
  }
  return hit;
}

int64_t PagePool::AttachPrefix(Sequence& seq) {
  const int64_t slots = FindPrefix(*seq.details);
  looked_up_tokens_ += static_cast<int64_t>(seq.details->tokens.size());
  hit_tokens_ += slots * page_size();
  Attach(seq, slots);
  return slots * page_size();
}

void PagePool::Attach(Sequence& seq, int64_t slots) {
  const int64_t length = slots * page_size();
  seq.pages().resize(slots * num_groups_, kNone);
  for (int64_t group = 0; group < num_groups_; ++group) {
    for (int64_t slot = PassedSlots(group, length); slot < slots; ++slot) {
      const int32_t page =
          pages_.Lookup(KeyOf(seq.details->chain[slot], group));
      pages_.Share(page);
      seq.pages()[slot * num_groups_ + group] = page;
    }
  }
  seq.length = seq.committed = seq.trimmed = static_cast<int32_t>(length);
  seq.published = static_cast<int32_t>(slots);
  seq.last_step = -1;
  SetTail(seq);
  seq.layout = ++layouts_;
}

PagePool::Opened PagePool::Open(std::span<const int32_t> tokens,
                                std::span<const uint8_t> salt) {
  auto details = Describe(tokens, salt);
  std::lock_guard lock(mutex_);
  const SequenceHandle handle = OpenSlot();
  Sequence& seq = sequences_[SlotOf(handle)];
  seq.num_keys = static_cast<int32_t>(details->chain.size());
  seq.details = std::move(details);
  return {handle, AttachPrefix(seq)};
}

int64_t PagePool::Probe(std::span<const int32_t> tokens,
                        std::span<const uint8_t> salt) const {
  const auto details = Describe(tokens, salt);
  std::lock_guard lock(mutex_);
  return FindPrefix(*details) * page_size();
}

Status PagePool::Extend(SequenceHandle handle,
                        std::span<const int32_t> tokens) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  if (!prefix_cache_) return Status();
  Sequence& seq = sequences_[slot];
  Learn(*seq.details, tokens);
  seq.num_keys = static_cast<int32_t>(seq.details->chain.size());
  if (seq.state != SequenceState::kSwappedOut) Publish(seq);
  return Status();
}

void PagePool::Publish(Sequence& seq) {
  SequenceDetails& details = *seq.details;
  const int64_t end =
      std::min<int64_t>(FullSlots(Committed(seq)), seq.num_keys);
  KeysAhead ahead(pages_, details, 0, seq.published, end);
  for (int64_t slot = seq.published; slot < end; ++slot) {
    ahead.Next();
    if (slot + kPagesAhead < end) {
      pages_.Prefetch(details.pages[(slot + kPagesAhead) * num_groups_]);
    }
    for (int64_t group = 0; group < num_groups_; ++group) {
      const int32_t page = details.pages[slot * num_groups_ + group];
      if (page == kNone || pages_.state(page) != PageState::kWritten) continue;
      pages_.Publish(page, KeyOf(details.chain[slot], group));
    }
  }
  seq.published = std::max(seq.published, static_cast<int32_t>(end));
}

// What the sequence said at and past `length` holds no longer.
void PagePool::Forget(Sequence& seq, int32_t length) {
  SequenceDetails& details = *seq.details;
  const size_t known = static_cast<size_t>(length);
  if (details.tokens.size() > known) details.tokens.resize(known);
  const size_t slots = static_cast<size_t>(FullSlots(length));
  if (details.chain.size() > slots) details.chain.resize(slots);
  seq.num_keys = static_cast<int32_t>(details.chain.size());
}

// Gives back what no later query sees.
void PagePool::Trim(Sequence& seq) {
  const int32_t committed = Committed(seq);
  for (int64_t group = 0; group < num_groups_; ++group) {
    const int64_t from = PassedSlots(group, seq.trimmed);
    const int64_t to =
        std::min(PassedSlots(group, committed),
                 static_cast<int64_t>(seq.pages().size()) / num_groups_);
    // The last first, as everywhere: a chain is evicted from its end.
    for (int64_t slot = to; slot-- > from;) {
      int32_t& page = seq.pages()[slot * num_groups_ + group];
      if (page != kNone) pages_.Release(std::exchange(page, kNone));
    }
  }
  seq.trimmed = std::max(seq.trimmed, committed);
}

// ---------------------------------------------------------- preempt and swap

Status PagePool::Preempt(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = FindOpen(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  DropPending(seq);
  NoteTruncation(seq, 0);
  Shrink(seq, 0);
  return Status();
}

Result<int64_t> PagePool::Resume(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = FindOpen(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  if (seq.length != 0) {
    return InvalidArgument(StrCat("sequence ", slot, " holds ", seq.length,
                                  " tokens. Only a preempted sequence, which "
                                  "holds none, is resumed."));
  }
  return AttachPrefix(seq);
}

Result<std::vector<int32_t>> PagePool::BeginSwapOut(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = FindOpen(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  if (seq.pending != kNone || Committed(seq) != seq.length) {
    return InvalidArgument(
        StrCat("sequence ", slot, " has ", seq.length, " tokens of which ",
               Committed(seq), " are committed",
               seq.pending != kNone ? " and waits for the copy of a page" : "",
               ". Commit its steps and take its copies before swapping out."));
  }
  seq.state = SequenceState::kSwappingOut;
  seq.layout = ++layouts_;
  return std::vector<int32_t>(seq.pages().begin(), seq.pages().end());
}

Status PagePool::EndSwapOut(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t slot;
  if (Status status = Find(handle, &slot); !status.ok()) return status;
  Sequence& seq = sequences_[slot];
  if (seq.state != SequenceState::kSwappingOut) {
    return InvalidArgument(StrCat("sequence ", slot,
                                  " is not being swapped out. Call "
                                  "begin_swap_out first."));
  }
  DropSlots(seq, 0);
  seq.state = SequenceState::kSwappedOut;
  return Status();
}

Result<std::vector<int32_t>> PagePool::SwapIn(SequenceHandle handle) {
  std::lock_guard lock(mutex_);
  uint32_t index;
  if (Status status = Find(handle, &index); !status.ok()) return status;
  Sequence& seq = sequences_[index];
  if (seq.state != SequenceState::kSwappedOut) {
    return InvalidArgument(StrCat("sequence ", index, " is not swapped out."));
  }
  const int64_t slots = SlotsFor(seq.length);
  std::vector<int32_t> pages(slots * num_groups_, kNone);
  std::vector<int32_t> fresh;
  int64_t revived = 0;
  for (int64_t i = 0; i < slots * num_groups_; ++i) {
    const int64_t slot = i / num_groups_, group = i % num_groups_;
    if (slot < PassedSlots(group, seq.trimmed)) continue;
    if (slot < std::min(seq.published, seq.num_keys)) {
      pages[i] = pages_.Lookup(KeyOf(seq.details->chain[slot], group));
    }
    if (pages[i] == kNone) {
      fresh.push_back(static_cast<int32_t>(i));
    } else {
      revived += pages_.state(pages[i]) == PageState::kEvictable;
    }
  }
  const int64_t need = static_cast<int64_t>(fresh.size());
  if (need + revived > pages_.available()) return Short(need + revived);
  // Held first: what was found must not be evicted for the rest.
  for (int32_t page : pages) {
    if (page != kNone) pages_.Share(page);
  }
  std::vector<int32_t> filled(pages.size(), kNone);
  for (int32_t i : fresh) {
    pages[i] = filled[i] = pages_.Take();
    pages_.Commit(pages[i]);
  }
  seq.pages().assign(pages.begin(), pages.end());
  SetTail(seq);
  if (!fresh.empty()) {
    seq.published = std::min(seq.published,
                             fresh.front() / static_cast<int32_t>(num_groups_));
  }
  seq.state = SequenceState::kOpen;
  seq.layout = ++layouts_;
  return filled;
}

}  // namespace pagemill
