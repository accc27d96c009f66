#include "csrc/core/sha256.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pagemill {
namespace {

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

Sha256Digest Digest(Sha256CompressFunction* compress,
                    std::span<const uint8_t> message) {
  Sha256 sha(compress);
  sha.Update(message);
  return sha.Finish();
}

std::vector<uint8_t> RandomBytes(size_t size, std::mt19937& random) {
  std::vector<uint8_t> bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

struct Implementation {
  std::string name;
  Sha256CompressFunction* compress;
};

class Sha256Test : public testing::TestWithParam<Implementation> {
 protected:
  void SetUp() override {
    if (!GetParam().compress) GTEST_SKIP() << "no SHA instructions here";
  }
  std::string HexOf(std::string_view message) {
    return Hex(Digest(GetParam().compress, Bytes(message)));
  }
};

INSTANTIATE_TEST_SUITE_P(
    Implementations, Sha256Test,
    testing::Values(Implementation{"Dispatched", Sha256Compress},
                    Implementation{"Portable",
                                   internal::Sha256CompressPortable},
                    Implementation{"Native", internal::Sha256CompressNative()}),
    [](const auto& info) { return info.param.name; });

// FIPS 180-4's examples and NIST's further ones.
TEST_P(Sha256Test, MatchesPublishedDigests) {
  EXPECT_EQ(HexOf(""),
            "e3b0c44298fc1c149afbf4c8996fb924"
            "27ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(HexOf("abc"),
            "ba7816bf8f01cfea414140de5dae2223"
            "b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(HexOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039"
            "a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(HexOf("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmn"
                  "hijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b049237"
            "0b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(HexOf(std::string(1000000, 'a')),
            "cdc76e5c9914fb9281a1c7e284d73e67"
            "f1809a48a497200e046d39ccc7112cd0");
}

TEST_P(Sha256Test, MatchesPortableOnEveryLength) {
  std::mt19937 random(0);
  for (size_t length = 0; length <= 300; ++length) {
    const std::vector<uint8_t> message = RandomBytes(length, random);
    EXPECT_EQ(Digest(GetParam().compress, message),
              Digest(internal::Sha256CompressPortable, message))
        << length;
  }
}

TEST_P(Sha256Test, PiecesDoNotMatter) {
  std::mt19937 random(0);
  const std::vector<uint8_t> message = RandomBytes(300, random);
  const Sha256Digest whole = Digest(GetParam().compress, message);
  for (int trial = 0; trial < 300; ++trial) {
    Sha256 sha(GetParam().compress);
    for (std::span<const uint8_t> rest = message; !rest.empty();) {
      const size_t size = std::min<size_t>(random() % 150, rest.size());
      sha.Update(rest.first(size));
      rest = rest.subspan(size);
    }
    EXPECT_EQ(sha.Finish(), whole);
  }
}

// Any state, any number of blocks, any alignment; what is past them is unread.
TEST_P(Sha256Test, CompressesLikePortable) {
  std::mt19937 random(0);
  for (size_t count = 0; count <= 5; ++count) {
    for (size_t offset = 0; offset < 16; ++offset) {
      const std::vector<uint8_t> bytes =
          RandomBytes(offset + count * kSha256BlockSize, random);
      uint32_t want[8], got[8];
      for (int i = 0; i < 8; ++i) want[i] = got[i] = random();
      internal::Sha256CompressPortable(want, bytes.data() + offset, count);
      GetParam().compress(got, bytes.data() + offset, count);
      for (int i = 0; i < 8; ++i) EXPECT_EQ(got[i], want[i]);
    }
  }
}

}  // namespace
}  // namespace pagemill
