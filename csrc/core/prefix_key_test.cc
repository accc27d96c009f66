#include "csrc/core/prefix_key.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pagemill {
namespace {

using Tokens = std::vector<int32_t>;

std::span<const uint8_t> Bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string Hex(const Sha256Digest& digest) {
  std::string hex;
  for (const uint8_t byte : digest) {
    hex += "0123456789abcdef"[byte >> 4];
    hex += "0123456789abcdef"[byte & 15];
  }
  return hex;
}

Sha256Digest Root(std::string_view secret, std::string_view salt,
                  int64_t page_size = 16) {
  return PrefixChain(Bytes(secret), Bytes(salt), page_size).Root();
}

std::vector<Sha256Digest> Keys(const Sha256Digest& root, const Tokens& tokens,
                               int64_t page_size = 16) {
  std::vector<Sha256Digest> keys(tokens.size() / page_size);
  PrefixChain::ExtendMany(root, tokens, page_size, keys.data());
  return keys;
}

// The definition, by the portable implementation and without a fast path.
Sha256Digest SlowExtend(const Sha256Digest& parent, const Tokens& tokens) {
  Sha256 sha(internal::Sha256CompressPortable);
  sha.Update(parent);
  for (const int32_t token : tokens) {
    const uint32_t bits = static_cast<uint32_t>(token);
    const uint8_t bytes[4] = {
        static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8),
        static_cast<uint8_t>(bits >> 16), static_cast<uint8_t>(bits >> 24)};
    sha.Update(bytes);
  }
  return sha.Finish();
}

Tokens Iota(size_t size, int32_t first) {
  Tokens tokens(size);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Computed with Python's hashlib: keys may outlive a process, so they must not
// change unnoticed.
TEST(PrefixKeyTest, KeysAreStable) {
  const Sha256Digest root16 = Root("secret", "salt", 16);
  EXPECT_EQ(Hex(root16),
            "a42d449c745a7ddf9c9707868da72556"
            "51877a0f28a02fe80bb51964aeb63dd2");
  EXPECT_EQ(Hex(Keys(root16, Iota(32, -3), 16).back()),
            "71982efb652945b0e97fc38830781c99"
            "62c3e51b59f487a0754347d73ac1443a");
  const Sha256Digest root5 = Root("secret", "salt", 5);
  EXPECT_EQ(Hex(root5),
            "57d64463e4971f249a2722c808959b20"
            "39e74067e66b11ac651f07aa875f0124");
  EXPECT_EQ(Hex(Keys(root5, Iota(10, -3), 5).back()),
            "755c3c605d75ee774b8ef8a777cf85d8"
            "d7305f5a5b36cfd74e9129be7d69f125");
}

TEST(PrefixKeyTest, RootsDependOnAllInputs) {
  const std::set<Sha256Digest> roots = {
      Root("ab", "c"),     Root("a", "bc"),   Root("abc", ""), Root("", "abc"),
      Root("", ""),        Root("ab", "d"),   Root("bb", "c"), Root("c", "ab"),
      Root("ab", "c", 32), Root("ab", "c", 1)};
  EXPECT_EQ(roots.size(), 10u);
  EXPECT_EQ(Root("ab", "c"), Root("ab", "c"));
}

TEST(PrefixKeyTest, ExtendMatchesTheDefinitionAtEveryPageSize) {
  std::mt19937 random(0);
  const Sha256Digest parent = Root("secret", "salt");
  for (size_t size = 1; size <= 130; ++size) {
    Tokens tokens(size);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random());
    EXPECT_EQ(PrefixChain::Extend(parent, tokens), SlowExtend(parent, tokens))
        << size;
  }
}

TEST(PrefixKeyTest, EveryTokenAndTheParentCount) {
  const Sha256Digest root = Root("secret", "salt");
  for (const size_t size : {1, 15, 16, 17, 64}) {
    const Tokens tokens = Iota(size, 100);
    std::set<Sha256Digest> keys = {PrefixChain::Extend(root, tokens)};
    for (size_t i = 0; i < size; ++i) {
      for (const int32_t other : {0, -1, 1 << 24, 99}) {
        Tokens changed = tokens;
        changed[i] = other;
        keys.insert(PrefixChain::Extend(root, changed));
      }
    }
    for (size_t i = 0; i < root.size(); ++i) {
      Sha256Digest parent = root;
      parent[i] ^= 1;
      keys.insert(PrefixChain::Extend(parent, tokens));
    }
    EXPECT_EQ(keys.size(), 1 + 4 * size + root.size()) << size;
  }
}

TEST(PrefixKeyTest, OrderAndPositionCount) {
  const Sha256Digest root = Root("secret", "salt");
  const Tokens tokens = Iota(16, 0);
  Tokens swapped = tokens;
  std::swap(swapped[3], swapped[4]);
  EXPECT_NE(PrefixChain::Extend(root, tokens),
            PrefixChain::Extend(root, swapped));
  // Equal pages, one after the other: no key comes twice.
  const std::vector<Sha256Digest> keys = Keys(root, Tokens(16 * 100, 7));
  EXPECT_EQ(std::set(keys.begin(), keys.end()).size(), keys.size());
}

TEST(PrefixKeyTest, ManyAreOnesInARow) {
  for (const int64_t page_size : {1, 7, 16, 32}) {
    const Sha256Digest root = Root("secret", "salt", page_size);
    const Tokens tokens = Iota(5 * page_size, 0);
    Sha256Digest parent = root;
    std::vector<Sha256Digest> want;
    for (int64_t i = 0; i < 5; ++i) {
      const auto page = std::span(tokens).subspan(i * page_size, page_size);
      want.push_back(parent = PrefixChain::Extend(parent, page));
    }
    EXPECT_EQ(Keys(root, tokens, page_size), want);
  }
}

TEST(PrefixKeyTest, ManyIgnoreTheUnfilledPage) {
  const Sha256Digest root = Root("secret", "salt");
  const Sha256Digest unset = {};
  for (const int size : {0, 1, 15, 16, 31, 32, 47}) {
    std::vector<Sha256Digest> keys(4, unset);
    PrefixChain::ExtendMany(root, Iota(size, 0), 16, keys.data());
    EXPECT_EQ(std::count(keys.begin(), keys.end(), unset), 4 - size / 16);
  }
}

TEST(PrefixKeyTest, SequencesShareKeysUpToWhereTheyPart) {
  std::mt19937 random(0);
  const Sha256Digest root = Root("secret", "salt");
  const Tokens tokens = Iota(160, 0);
  const std::vector<Sha256Digest> keys = Keys(root, tokens);
  for (size_t part = 0; part < tokens.size(); ++part) {
    Tokens other = tokens;
    other[part] ^= 1 << random() % 31;
    const std::vector<Sha256Digest> others = Keys(root, other);
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(keys[i] == others[i], i < part / 16) << part << " " << i;
    }
  }
}

TEST(PrefixKeyTest, TenantsShareNoKey) {
  const Tokens tokens = Iota(160, 0);
  std::set<Sha256Digest> keys;
  for (const std::string_view salt : {"", "a", "b"}) {
    for (const std::string_view secret : {"s", "t"}) {
      for (const Sha256Digest& key : Keys(Root(secret, salt), tokens)) {
        keys.insert(key);
      }
    }
  }
  EXPECT_EQ(keys.size(), 3u * 2 * 10);
}

}  // namespace
}  // namespace pagemill
