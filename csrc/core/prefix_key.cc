#include "csrc/core/prefix_key.h"

#include <bit>
#include <cstddef>
#include <cstring>
#include <string_view>

namespace pagemill {
namespace {

// Integers are hashed as they lie in memory.
static_assert(std::endian::native == std::endian::little);

// Changes whenever the keys' definition does.
constexpr std::string_view kTag = "pagemill prefix key 1";

template <typename T>
std::span<const uint8_t> Bytes(std::span<const T> values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size_bytes()};
}

void UpdateInteger(Sha256& sha, uint64_t value) {
  sha.Update(Bytes(std::span<const uint64_t>(&value, 1)));
}

void UpdateString(Sha256& sha, std::span<const uint8_t> bytes) {
  UpdateInteger(sha, bytes.size());
  sha.Update(bytes);
}

// A page's whole message, padded: kTokens / 16 + 1 blocks.
template <size_t kTokens>
struct PaddedPage {
  Sha256Digest parent;
  int32_t tokens[kTokens];
  uint8_t padding[32] = {0x80};

  PaddedPage(const Sha256Digest& key, const int32_t* page_tokens)
      : parent(key) {
    std::memcpy(tokens, page_tokens, sizeof(tokens));
    constexpr size_t kBits = 8 * (sizeof(parent) + sizeof(tokens));
    static_assert(kBits < 1 << 16);
    padding[30] = kBits >> 8;
    padding[31] = kBits & 0xff;
  }
};

template <size_t kTokens>
Sha256Digest ExtendPadded(const Sha256Digest& parent, const int32_t* tokens) {
  using Page = PaddedPage<kTokens>;
  static_assert(sizeof(Page) % kSha256BlockSize == 0);
  const Page page(parent, tokens);
  auto state = kSha256Initial;
  Sha256Compress(state.data(), reinterpret_cast<const uint8_t*>(&page),
                 sizeof(Page) / kSha256BlockSize);
  return Sha256DigestOf(state.data());
}

Sha256Digest ExtendAny(const Sha256Digest& parent,
                       std::span<const int32_t> tokens) {
  Sha256 sha;
  sha.Update(parent);
  sha.Update(Bytes(tokens));
  return sha.Finish();
}

}  // namespace

PrefixChain::PrefixChain(std::span<const uint8_t> secret,
                         std::span<const uint8_t> salt, int64_t page_size) {
  Sha256 sha;
  sha.Update(Bytes(std::span<const char>(kTag)));
  UpdateString(sha, secret);
  UpdateString(sha, salt);
  UpdateInteger(sha, static_cast<uint64_t>(page_size));
  root_ = sha.Finish();
}

Sha256Digest PrefixChain::Extend(const Sha256Digest& parent,
                                 std::span<const int32_t> page_tokens) {
  // clang-format off
  switch (page_tokens.size()) {
    case 16: return ExtendPadded<16>(parent, page_tokens.data());
    case 32: return ExtendPadded<32>(parent, page_tokens.data());
    case 64: return ExtendPadded<64>(parent, page_tokens.data());
    case 128: return ExtendPadded<128>(parent, page_tokens.data());
    default: return ExtendAny(parent, page_tokens);
  }
  // clang-format on
}

void PrefixChain::ExtendMany(Sha256Digest parent,
                             std::span<const int32_t> tokens, int64_t page_size,
                             Sha256Digest* out) {
  const size_t size = static_cast<size_t>(page_size);
  for (; tokens.size() >= size; tokens = tokens.subspan(size)) {
    parent = *out++ = Extend(parent, tokens.first(size));
  }
}

}  // namespace pagemill
