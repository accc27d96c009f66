#include "csrc/core/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__) && !defined(PAGEMILL_SCALAR)
#define PAGEMILL_SHA_NI 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace pagemill {
namespace {

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

uint32_t BigEndian(uint32_t word) {
  return std::endian::native == std::endian::big ? word
                                                 : __builtin_bswap32(word);
}
uint32_t LoadWord(const uint8_t* in) {
  uint32_t word;
  std::memcpy(&word, in, sizeof(word));
  return BigEndian(word);
}
void StoreWord(uint32_t word, uint8_t* out) {
  word = BigEndian(word);
  std::memcpy(out, &word, sizeof(word));
}

// Instead of moving all eight working variables on, a round updates two of them
// and its caller names them one further.
inline void Round(uint32_t a, uint32_t b, uint32_t c, uint32_t& d, uint32_t e,
                  uint32_t f, uint32_t g, uint32_t& h, uint32_t word) {
  using std::rotr;
  h += (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + (g ^ (e & (f ^ g))) + word;
  d += h;
  h += (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) | (c & (a | b)));
}

// The message schedule with the round constants added.
void Schedule(const uint8_t* block, uint32_t words[64]) {
  using std::rotr;
  for (int t = 0; t < 16; ++t) words[t] = LoadWord(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t x = words[t - 15], y = words[t - 2];
    words[t] = words[t - 16] + (rotr(x, 7) ^ rotr(x, 18) ^ x >> 3) +
               words[t - 7] + (rotr(y, 17) ^ rotr(y, 19) ^ y >> 10);
  }
  for (int t = 0; t < 64; ++t) words[t] += kRound[t];
}

#if PAGEMILL_SHA_NI

#define PAGEMILL_TARGET_SHA __attribute__((target("sha,sse4.1,ssse3")))

// The state as the instructions want it, highest word first.
struct ShaNiState {
  __m128i abef, cdgh;
};

PAGEMILL_TARGET_SHA inline __m128i LoadWords(const uint8_t* block, int i) {
  const __m128i swap =
      _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
  return _mm_shuffle_epi8(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + i), swap);
}

// Four rounds, from round t on.
PAGEMILL_TARGET_SHA inline void Rounds(ShaNiState& s, __m128i words, int t) {
  const __m128i sum = _mm_add_epi32(
      words, _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + t)));
  s.cdgh = _mm_sha256rnds2_epu32(s.cdgh, s.abef, sum);
  s.abef = _mm_sha256rnds2_epu32(s.abef, s.cdgh, _mm_unpackhi_epi64(sum, sum));
}

// The four words of the schedule that follow the sixteen given.
PAGEMILL_TARGET_SHA inline __m128i Next(__m128i w0, __m128i w4, __m128i w8,
                                        __m128i w12) {
  const __m128i sum =
      _mm_add_epi32(_mm_sha256msg1_epu32(w0, w4), _mm_alignr_epi8(w12, w8, 4));
  return _mm_sha256msg2_epu32(sum, w12);
}

PAGEMILL_TARGET_SHA void CompressBlock(ShaNiState& s, const uint8_t* block) {
  const ShaNiState before = s;
  __m128i w0 = LoadWords(block, 0), w4 = LoadWords(block, 1),
          w8 = LoadWords(block, 2), w12 = LoadWords(block, 3);
  for (int t = 0; t < 48; t += 16) {
    Rounds(s, w0, t);
    w0 = Next(w0, w4, w8, w12);
    Rounds(s, w4, t + 4);
    w4 = Next(w4, w8, w12, w0);
    Rounds(s, w8, t + 8);
    w8 = Next(w8, w12, w0, w4);
    Rounds(s, w12, t + 12);
    w12 = Next(w12, w0, w4, w8);
  }
  Rounds(s, w0, 48);
  Rounds(s, w4, 52);
  Rounds(s, w8, 56);
  Rounds(s, w12, 60);
  s.abef = _mm_add_epi32(s.abef, before.abef);
  s.cdgh = _mm_add_epi32(s.cdgh, before.cdgh);
}

PAGEMILL_TARGET_SHA void CompressShaNi(uint32_t state[8], const uint8_t* blocks,
                                       size_t count) {
  __m128i* const words = reinterpret_cast<__m128i*>(state);
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
  ShaNiState s = {_mm_alignr_epi8(badc, hgfe, 8),
                  _mm_blend_epi16(hgfe, badc, 0xf0)};
  for (; count > 0; --count, blocks += kSha256BlockSize) {
    CompressBlock(s, blocks);
  }
  const __m128i abef = _mm_shuffle_epi32(s.abef, 0x1b);
  const __m128i ghcd = _mm_shuffle_epi32(s.cdgh, 0xb1);
  _mm_storeu_si128(words, _mm_blend_epi16(abef, ghcd, 0xf0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(ghcd, abef, 8));
}

// Asked of the CPU itself: not every compiler's __builtin_cpu_supports knows
// "sha".
bool RunsShaNi() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  if (!(c & bit_SSSE3) || !(c & bit_SSE4_1)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

#endif  // PAGEMILL_SHA_NI

}  // namespace

namespace internal {

void Sha256CompressPortable(uint32_t state[8], const uint8_t* blocks,
                            size_t count) {
  for (; count > 0; --count, blocks += kSha256BlockSize) {
    uint32_t words[64];
    Schedule(blocks, words);
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; t += 8) {
      Round(a, b, c, d, e, f, g, h, words[t]);
      Round(h, a, b, c, d, e, f, g, words[t + 1]);
      Round(g, h, a, b, c, d, e, f, words[t + 2]);
      Round(f, g, h, a, b, c, d, e, words[t + 3]);
      Round(e, f, g, h, a, b, c, d, words[t + 4]);
      Round(d, e, f, g, h, a, b, c, words[t + 5]);
      Round(c, d, e, f, g, h, a, b, words[t + 6]);
      Round(b, c, d, e, f, g, h, a, words[t + 7]);
    }
    const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += sums[i];
  }
}

Sha256CompressFunction* Sha256CompressNative() {
#if PAGEMILL_SHA_NI
  if (RunsShaNi()) return CompressShaNi;
#endif
  return nullptr;
}

}  // namespace internal

void Sha256Compress(uint32_t state[8], const uint8_t* blocks, size_t count) {
  static Sha256CompressFunction* const native =
      internal::Sha256CompressNative();
  (native ? native : internal::Sha256CompressPortable)(state, blocks, count);
}

Sha256Digest Sha256DigestOf(const uint32_t state[8]) {
  Sha256Digest digest;
  for (int i = 0; i < 8; ++i) StoreWord(state[i], digest.data() + 4 * i);
  return digest;
}

void Sha256::Update(std::span<const uint8_t> data) {
  const size_t waiting = length_ % kSha256BlockSize;
  length_ += data.size();
  if (waiting > 0) {
    const size_t take = std::min(kSha256BlockSize - waiting, data.size());
    std::copy_n(data.begin(), take, buffer_.begin() + waiting);
    if (waiting + take < kSha256BlockSize) return;
    compress_(state_.data(), buffer_.data(), 1);
    data = data.subspan(take);
  }
  compress_(state_.data(), data.data(), data.size() / kSha256BlockSize);
  const auto rest = data.last(data.size() % kSha256BlockSize);
  std::copy(rest.begin(), rest.end(), buffer_.begin());
}

Sha256Digest Sha256::Finish() {
  constexpr size_t kLengthSize = sizeof(length_);
  size_t used = length_ % kSha256BlockSize;
  buffer_[used++] = 0x80;
  if (used > kSha256BlockSize - kLengthSize) {
    std::fill(buffer_.begin() + used, buffer_.end(), 0);
    compress_(state_.data(), buffer_.data(), 1);
    used = 0;
  }
  std::fill(buffer_.begin() + used, buffer_.end() - kLengthSize, 0);
  uint8_t* const length = buffer_.data() + buffer_.size() - kLengthSize;
  StoreWord(static_cast<uint32_t>(8 * length_ >> 32), length);
  StoreWord(static_cast<uint32_t>(8 * length_), length + 4);
  compress_(state_.data(), buffer_.data(), 1);
  return Sha256DigestOf(state_.data());
}

}  // namespace pagemill
