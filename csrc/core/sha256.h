// SHA-256 (FIPS 180-4), with the CPU's SHA instructions where it has them.
#ifndef PAGEMILL_CSRC_CORE_SHA256_H_
#define PAGEMILL_CSRC_CORE_SHA256_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace pagemill {

using Sha256Digest = std::array<uint8_t, 32>;

inline constexpr size_t kSha256BlockSize = 64;
inline constexpr std::array<uint32_t, 8> kSha256Initial = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

// Folds `count` whole blocks into a state; neither needs alignment.  The caller
// pads the message.
using Sha256CompressFunction = void(uint32_t state[8], const uint8_t* blocks,
                                    size_t count);
Sha256CompressFunction Sha256Compress;

// The digest of a state: its words, big-endian.
Sha256Digest Sha256DigestOf(const uint32_t state[8]);

// A message in pieces: any number of Update, then Finish once.
class Sha256 {
 public:
  explicit Sha256(Sha256CompressFunction* compress = Sha256Compress)
      : compress_(compress) {}

  void Update(std::span<const uint8_t> data);
  Sha256Digest Finish();

 private:
  Sha256CompressFunction* compress_;
  std::array<uint32_t, 8> state_ = kSha256Initial;
  std::array<uint8_t, kSha256BlockSize> buffer_;
  uint64_t length_ = 0;  // the last length_ % 64 bytes wait in buffer_
};

namespace internal {

// The implementations behind Sha256Compress, apart so that tests can hold one
// against the other.
Sha256CompressFunction Sha256CompressPortable;

// Null where this CPU has no SHA instructions.
Sha256CompressFunction* Sha256CompressNative();

}  // namespace internal
}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_SHA256_H_
