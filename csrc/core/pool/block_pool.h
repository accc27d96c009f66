// BlockPool: pages handed out one by one to a caller that keeps its own tables
// and hashes, as vLLM's scheduler does; it calls a page a block.
//
// Block 0 is the null block: it stands for no block, and is never handed out.
// Others are taken, shared, released, and published under a hash and a group.
// Several blocks may be published under the same hash: the first is found.
//
// Order of reuse: what was released without a hash, the last first; then what
// was never used, by ids; then what was released with a hash, the first first.
// Of one Release, the first of its blocks is reused first.
//
// A call that fails changes nothing.  Not thread-safe.  Every call is
// O(blocks named), but for the walk of index buckets.
#ifndef PAGEMILL_CSRC_CORE_POOL_BLOCK_POOL_H_
#define PAGEMILL_CSRC_CORE_POOL_BLOCK_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "csrc/core/pool/pages.h"
#include "csrc/core/status.h"

namespace pagemill {

// What a caller calls the content of a block: most often a SHA-256 digest.
struct BlockHash {
  static constexpr size_t kMaxSize = 32;

  std::array<uint8_t, kMaxSize> bytes{};
  uint32_t group = 0;
  uint8_t size = 0;
  int64_t num_tokens = 0;  // up to the block's end

  static Result<BlockHash> Of(std::span<const uint8_t> bytes, uint32_t group);
  // 128 bits of it, that groups do not share.
  PageKey Key() const;
  bool IsSame(const BlockHash& other) const {
    return bytes == other.bytes && size == other.size && group == other.group;
  }
};

class BlockPool {
 public:
  static constexpr int32_t kNull = 0;
  static constexpr int32_t kNone = Pages::kNone;

  // `log_evictions`: keep the hashes of evicted blocks for TakeEvicted.
  static Result<std::unique_ptr<BlockPool>> Create(int64_t num_blocks,
                                                   bool caching,
                                                   bool log_evictions);

  int64_t num_blocks() const { return pages_.total(); }
  bool caching() const { return caching_; }
  int64_t num_free() const { return pages_.available(); }

  // `count` blocks held once each, in the order of reuse.
  Result<std::vector<int32_t>> Take(int64_t count);
  // One more holder each; the null block is passed over.
  Status Share(std::span<const int32_t> blocks);
  // One holder less each; the null block is passed over.
  Status Release(std::span<const int32_t> blocks);

  // Publishes blocks[i] under hashes[i]; held blocks without a hash.
  Status Publish(std::span<const int32_t> blocks,
                 std::span<const BlockHash> hashes);
  // The block that was first published under the hash and still is, or kNone.
  int32_t Find(const BlockHash& hash) const;

  // Nobody finds these blocks any more; those held stay held, others keep their
  // place in the order of reuse.  Blocks without a hash are passed over.
  Status Forget(std::span<const int32_t> blocks);
  // Forgets all; false, with nothing changed, while a block is held.
  bool Reset();
  // The hashes that Take and Forget evicted since the last call, in order.
  std::vector<BlockHash> TakeEvicted() { return std::exchange(evicted_, {}); }

  Result<int32_t> References(int64_t block) const;
  // Null where it has none.
  Result<const BlockHash*> HashOf(int64_t block) const;
  // How many of the blocks nobody holds.
  Result<int64_t> CountReleased(std::span<const int32_t> blocks) const;

  Status Audit() const;

 private:
  BlockPool(int64_t num_blocks, bool caching, bool log_evictions);

  Status CheckId(int64_t block) const;
  // Each allows what times_ says the call has named it so far.
  Status CheckRelease(int32_t block) const;
  Status CheckPublish(int32_t block) const;
  // Counts in times_ how often each block is named; zeros again if it fails.
  Status CheckEach(std::span<const int32_t> blocks,
                   Status (BlockPool::*check)(int32_t) const);

  const bool caching_;
  const bool log_evictions_;
  Pages pages_;
  ZeroedArray<BlockHash> hashes_;
  ZeroedArray<int32_t> times_;  // zeros between calls
  std::vector<BlockHash> evicted_;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_POOL_BLOCK_POOL_H_
