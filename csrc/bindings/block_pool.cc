#include "csrc/core/pool/block_pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bindings/module.h"
#include "csrc/bindings/status.h"

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

using Ids = std::vector<int32_t>;
using Hashes = nb::typed<nb::list, nb::bytes>;

BlockHash HashFrom(const nb::bytes& bytes, uint32_t group) {
  return ValueOrRaise(BlockHash::Of(
      {static_cast<const uint8_t*>(bytes.data()), bytes.size()}, group));
}

// The hash and its group, big-endian, as vLLM joins them.
nb::bytes Joined(const BlockHash& hash) {
  std::array<uint8_t, BlockHash::kMaxSize + 4> out;
  uint8_t* end = std::copy_n(hash.bytes.begin(), hash.size, out.begin());
  for (int shift = 24; shift >= 0; shift -= 8) {
    *end++ = static_cast<uint8_t>(hash.group >> shift);
  }
  return nb::bytes(out.data(), static_cast<size_t>(end - out.data()));
}

std::shared_ptr<BlockPool> MakePool(int64_t num_blocks, bool caching,
                                    bool log_evictions) {
  return ValueOrRaise(BlockPool::Create(num_blocks, caching, log_evictions));
}

void Publish(BlockPool& pool, const Ids& blocks, const Hashes& hashes,
             const std::vector<int64_t>& num_tokens, uint32_t group) {
  std::vector<BlockHash> keys;
  keys.reserve(hashes.size());
  for (nb::handle hash : hashes) {
    keys.push_back(HashFrom(nb::cast<nb::bytes>(hash), group));
  }
  for (size_t i = 0; i < std::min(keys.size(), num_tokens.size()); ++i) {
    keys[i].num_tokens = num_tokens[i];
  }
  RaiseIfError(pool.Publish(blocks, keys));
}

// The blocks of all groups, or none.
std::optional<Ids> Find(const BlockPool& pool, const nb::bytes& hash,
                        const std::vector<uint32_t>& groups) {
  Ids blocks;
  BlockHash key = HashFrom(hash, 0);
  for (const uint32_t group : groups) {
    key.group = group;
    blocks.push_back(pool.Find(key));
    if (blocks.back() == BlockPool::kNone) return std::nullopt;
  }
  return blocks;
}

// For each group the blocks of the first hashes, up to one that some group
// lacks.
std::vector<Ids> FindPrefix(const BlockPool& pool, const nb::object& hashes,
                            size_t limit, const std::vector<uint32_t>& groups) {
  std::vector<Ids> found(groups.size());
  for (nb::handle hash : nb::iter(hashes)) {
    if (limit-- == 0) break;
    const auto blocks = Find(pool, nb::cast<nb::bytes>(hash), groups);
    if (!blocks) break;
    for (size_t i = 0; i < groups.size(); ++i) found[i].push_back((*blocks)[i]);
  }
  return found;
}

std::optional<nb::bytes> HashOf(const BlockPool& pool, int64_t block) {
  const BlockHash* hash = ValueOrRaise(pool.HashOf(block));
  if (hash == nullptr) return std::nullopt;
  return Joined(*hash);
}

std::optional<int64_t> NumTokensOf(const BlockPool& pool, int64_t block) {
  const BlockHash* hash = ValueOrRaise(pool.HashOf(block));
  if (hash == nullptr) return std::nullopt;
  return hash->num_tokens;
}

Hashes TakeEvicted(BlockPool& pool) {
  Hashes out;
  for (const BlockHash& hash : pool.TakeEvicted()) out.append(Joined(hash));
  return out;
}

void BindHolders(nb::class_<BlockPool>& pool) {
  pool.def(
          "take",
          [](BlockPool& p, int64_t count) {
            return ValueOrRaise(p.Take(count));
          },
          "count"_a)
      .def(
          "share",
          [](BlockPool& p, const Ids& blocks) {
            RaiseIfError(p.Share(blocks));
          },
          "blocks"_a)
      .def(
          "release",
          [](BlockPool& p, const Ids& blocks) {
            RaiseIfError(p.Release(blocks));
          },
          "blocks"_a)
      .def(
          "references",
          [](const BlockPool& p, int64_t block) {
            return ValueOrRaise(p.References(block));
          },
          "block"_a)
      .def(
          "count_released",
          [](const BlockPool& p, const Ids& blocks) {
            return ValueOrRaise(p.CountReleased(blocks));
          },
          "blocks"_a)
      .def_prop_ro("num_blocks", &BlockPool::num_blocks)
      .def_prop_ro("num_free", &BlockPool::num_free)
      .def("audit", [](const BlockPool& p) { RaiseIfError(p.Audit()); });
}

void BindHashes(nb::class_<BlockPool>& pool) {
  pool.def("publish", &Publish, "blocks"_a, "hashes"_a, "num_tokens"_a,
           "group"_a)
      .def("find", &Find, "hash"_a, "groups"_a)
      .def("find_prefix", &FindPrefix, "hashes"_a, "limit"_a, "groups"_a)
      .def(
          "forget",
          [](BlockPool& p, const Ids& blocks) {
            RaiseIfError(p.Forget(blocks));
          },
          "blocks"_a)
      .def("reset", &BlockPool::Reset)
      .def("take_evicted", &TakeEvicted)
      .def("hash_of", &HashOf, "block"_a)
      .def("num_tokens_of", &NumTokensOf, "block"_a);
}

}  // namespace

void BindBlockPool(nb::module_& m) {
  nb::class_<BlockPool> pool(m, "BlockPool",
                             "Pages for callers with tables and hashes of "
                             "their own.");
  pool.def(nb::new_(&MakePool), "num_blocks"_a, "caching"_a, "log_evictions"_a);
  BindHolders(pool);
  BindHashes(pool);
}

}  // namespace pagemill::bindings
