#include "csrc/core/pool/block_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "csrc/core/sha256.h"
#include "csrc/core/str_cat.h"

namespace pagemill {
namespace {

Status TooFew(int64_t count, int64_t free) {
  return {StatusCode::kResourceExhausted,
          StrCat("num_blocks=", count, " must be at most the ", free,
                 " free blocks. Free a request's blocks, or ask how many are "
                 "free first."),
          {.need = count, .free = free}};
}

}  // namespace

Result<BlockHash> BlockHash::Of(std::span<const uint8_t> bytes,
                                uint32_t group) {
  if (bytes.empty() || bytes.size() > kMaxSize) {
    return InvalidArgument(StrCat("block_hash of ", bytes.size(),
                                  " bytes must have 1 to ", kMaxSize,
                                  ". Pass a digest."));
  }
  BlockHash hash;
  std::copy(bytes.begin(), bytes.end(), hash.bytes.begin());
  hash.size = static_cast<uint8_t>(bytes.size());
  hash.group = group;
  return hash;
}

PageKey BlockHash::Key() const {
  std::array<uint64_t, kMaxSize / sizeof(uint64_t)> words;
  if (size == kMaxSize) {
    std::memcpy(words.data(), bytes.data(), kMaxSize);
  } else {
    // Short ones may be anything: no few of their bits tell them apart.
    Sha256 sha;
    sha.Update({bytes.data(), size});
    const Sha256Digest digest = sha.Finish();
    std::memcpy(words.data(), digest.data(), kMaxSize);
  }
  // Any mixture of a digest's words is as good; this one also tells apart what
  // tests use for digests.
  PageKey key = {(words[0] + 3 * words[2]) ^ group, words[1] + 3 * words[3]};
  if (!key) key.low = 1;  // zero is no key
  return key;
}

Result<std::unique_ptr<BlockPool>> BlockPool::Create(int64_t num_blocks,
                                                     bool caching,
                                                     bool log_evictions) {
  if (num_blocks < 1 || num_blocks > Pages::kMaxPages) {
    return InvalidArgument(StrCat("num_gpu_blocks=", num_blocks,
                                  " must be in range [1, ", Pages::kMaxPages,
                                  "]. Pass the KV cache's blocks."));
  }
  return std::unique_ptr<BlockPool>(
      new BlockPool(num_blocks, caching, log_evictions));
}

BlockPool::BlockPool(int64_t num_blocks, bool caching, bool log_evictions)
    : caching_(caching),
      log_evictions_(log_evictions),
      pages_(num_blocks, caching, 0, /*duplicates=*/true),
      hashes_(caching ? num_blocks : 1),
      times_(num_blocks) {
  pages_.Commit(pages_.Take());  // kNull
}

// -------------------------------------------------------------------- holders

Result<std::vector<int32_t>> BlockPool::Take(int64_t count) {
  if (count < 0) {
    return InvalidArgument(
        StrCat("num_blocks=", count, " must be at least 0."));
  }
  if (count > num_free()) return TooFew(count, num_free());
  std::vector<int32_t> blocks(static_cast<size_t>(count));
  for (int32_t& block : blocks) {
    const int64_t evictions = pages_.num_evictions();
    block = pages_.Take();
    pages_.Commit(block);
    if (log_evictions_ && pages_.num_evictions() != evictions) {
      evicted_.push_back(hashes_[block]);
    }
  }
  return blocks;
}

Status BlockPool::Share(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) {
    if (Status status = CheckId(block); !status.ok()) return status;
    if (pages_.state(block) == PageState::kFree) {
      return InvalidArgument(
          StrCat("block ", block,
                 " cannot be touched: it is free and holds nothing. Touch "
                 "blocks right after get_cached_block has found them."));
    }
  }
  for (const int32_t block : blocks) {
    if (block != kNull) pages_.Share(block);
  }
  return Status();
}

Status BlockPool::Release(std::span<const int32_t> blocks) {
  if (Status status = CheckEach(blocks, &BlockPool::CheckRelease);
      !status.ok()) {
    return status;
  }
  // What is evictable goes to its list's end, what is free to the front: two
  // walks, so that the first of the blocks comes first in each.
  for (const int32_t block : blocks) {
    if (block != kNull && pages_.HasKey(block)) pages_.Release(block);
  }
  for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
    const int32_t times = std::exchange(times_[*it], 0);
    if (*it == kNull || pages_.HasKey(*it)) continue;
    for (int32_t i = 0; i < times; ++i) pages_.Release(*it);
  }
  return Status();
}

Status BlockPool::CheckEach(std::span<const int32_t> blocks,
                            Status (BlockPool::*check)(int32_t) const) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    Status status = CheckId(blocks[i]);
    if (status.ok()) {
      ++times_[blocks[i]];
      status = (this->*check)(blocks[i]);
      if (status.ok()) continue;
      times_[blocks[i]] = 0;
    }
    for (size_t k = 0; k < i; ++k) times_[blocks[k]] = 0;
    return status;
  }
  return Status();
}

Status BlockPool::CheckRelease(int32_t block) const {
  const int32_t held = pages_.references(block);
  if (block == kNull || times_[block] <= held) return Status();
  return InvalidArgument(StrCat(
      "block ", block, " has ref_cnt=", held, " and cannot be freed ",
      times_[block] == 1 ? "again" : "that often",
      ". Free a block once for each time that it was allocated or touched."));
}

// --------------------------------------------------------------------- hashes

Status BlockPool::Publish(std::span<const int32_t> blocks,
                          std::span<const BlockHash> hashes) {
  if (blocks.size() != hashes.size()) {
    return InvalidArgument(StrCat(blocks.size(), " blocks need as many hashes,",
                                  " not ", hashes.size(), "."));
  }
  if (!caching_) return Status();
  if (Status status = CheckEach(blocks, &BlockPool::CheckPublish);
      !status.ok()) {
    return status;
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    times_[blocks[i]] = 0;
    hashes_[blocks[i]] = hashes[i];
    pages_.PublishBehind(blocks[i], hashes[i].Key());
  }
  return Status();
}

Status BlockPool::CheckPublish(int32_t block) const {
  const char* fault = block == kNull                  ? "the null block"
                      : pages_.references(block) == 0 ? "held by nobody"
                      : pages_.HasKey(block)          ? "cached already"
                      : times_[block] > 1             ? "named twice"
                                                      : nullptr;
  if (fault == nullptr) return Status();
  return InvalidArgument(
      StrCat("block ", block, " cannot be cached: it is ", fault,
             ". Cache the full blocks that a request holds, each once."));
}

int32_t BlockPool::Find(const BlockHash& hash) const {
  if (!caching_) return kNone;
  const int32_t block = pages_.Lookup(hash.Key());
  // Keys are 128 bits of hashes: what another hash has published is a miss.
  return block != kNone && hashes_[block].IsSame(hash) ? block : kNone;
}

Status BlockPool::Forget(std::span<const int32_t> blocks) {
  for (const int32_t block : blocks) {
    if (Status status = CheckId(block); !status.ok()) return status;
  }
  for (const int32_t block : blocks) {
    if (!pages_.HasKey(block)) continue;
    if (log_evictions_) evicted_.push_back(hashes_[block]);
    pages_.Forget(block);
  }
  return Status();
}

bool BlockPool::Reset() {
  if (num_free() != num_blocks() - 1) return false;
  pages_.ForgetEvictable();
  return true;
}

// -------------------------------------------------------------------- queries

Status BlockPool::CheckId(int64_t block) const {
  if (block >= 0 && block < num_blocks()) return Status();
  return InvalidArgument(StrCat("block ", block, " must be in range [0, ",
                                num_blocks() - 1,
                                "]. Pass blocks of this pool."));
}

Result<int32_t> BlockPool::References(int64_t block) const {
  if (Status status = CheckId(block); !status.ok()) return status;
  return block == kNull ? 0 : pages_.references(static_cast<int32_t>(block));
}

Result<const BlockHash*> BlockPool::HashOf(int64_t block) const {
  if (Status status = CheckId(block); !status.ok()) return status;
  const bool has = pages_.HasKey(static_cast<int32_t>(block));
  return has ? &hashes_[block] : nullptr;
}

Result<int64_t> BlockPool::CountReleased(
    std::span<const int32_t> blocks) const {
  int64_t count = 0;
  for (const int32_t block : blocks) {
    if (Status status = CheckId(block); !status.ok()) return status;
    count += pages_.references(block) == 0;
  }
  return count;
}

Status BlockPool::Audit() const {
  std::vector<int32_t> holders(static_cast<size_t>(num_blocks()));
  for (int32_t block = 0; block < num_blocks(); ++block) {
    holders[block] = pages_.references(block);
    if (times_[block] != 0) return Internal("a count was left behind");
  }
  const char* fault = pages_.Audit(holders);
  return *fault == '\0' ? Status() : Internal(fault);
}

}  // namespace pagemill
