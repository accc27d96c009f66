// Vectors of floats, as wide as the including file is compiled for.
//
// Only for the kernel_*.cc files: everything has internal linkage, because
// each of them means something else by it.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_VECTOR_INL_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_VECTOR_INL_H_

#include <cstdint>
#include <utility>

namespace pagemill::attention {
namespace {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kNumRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kNumRegisters = 16;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kNumRegisters = 16;
#endif
inline constexpr int kLanes = kVectorBytes / 4;

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Ints = int32_t __attribute__((vector_size(kVectorBytes)));
using Bits = uint32_t __attribute__((vector_size(kVectorBytes)));
using QuarterBits = uint8_t __attribute__((vector_size(kVectorBytes / 4)));
using QuarterInts = int8_t __attribute__((vector_size(kVectorBytes / 4)));
using HalfBits = uint16_t __attribute__((vector_size(kVectorBytes / 2)));

struct BFloat16 {
  uint16_t bits;
};

// Sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity.
struct F8E4M3 {
  uint8_t bits;
};

// Sign, 5 bits of exponent (bias 15), 2 of mantissa.
struct F8E5M2 {
  uint8_t bits;
};

constexpr float kInfinity = __builtin_inff();

inline Floats Splat(float x) { return x - Floats{}; }
inline Ints SplatInt(int32_t x) { return x + Ints{}; }
inline Floats AsFloats(Bits x) { return reinterpret_cast<Floats>(x); }
inline Bits AsBits(Floats x) { return reinterpret_cast<Bits>(x); }
inline Floats Max(Floats a, Floats b) { return a > b ? a : b; }

inline Floats Load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
inline void Store(Floats x, float* to) { __builtin_memcpy(to, &x, sizeof(x)); }

// bf16 is the upper half of f32.
inline Floats Load(const BFloat16* from) {
  HalfBits x;
  __builtin_memcpy(&x, from, sizeof(x));
  return AsFloats(__builtin_convertvector(x, Bits) << 16);
}

// A float with fewer bits of exponent, of a bias, and of mantissa.  By integers
// only: threads may flush denormal floats to 0.  Not for infinities and NaN.
template <int kExponent, int kMantissa, int kBias>
inline Floats Widened(Bits x) {
  constexpr uint32_t kImplicit = uint32_t{1} << kMantissa;
  const Bits exponent = (x >> kMantissa) & ((1u << kExponent) - 1);
  const Bits normal = Bits(exponent != 0) & 1;
  const Bits mantissa = (x & (kImplicit - 1)) | (normal * kImplicit);
  const Bits power = exponent + (1 - normal) + (127 - kBias - kMantissa);
  const Floats magnitude =
      __builtin_convertvector(Ints(mantissa), Floats) * AsFloats(power << 23);
  constexpr int kSign = 31 - kExponent - kMantissa;
  return AsFloats(AsBits(magnitude) | ((x << kSign) & 0x80000000u));
}

inline Bits LoadBytes(const void* from) {
  QuarterBits x;
  __builtin_memcpy(&x, from, sizeof(x));
  return __builtin_convertvector(x, Bits);
}

inline Floats Load(const F8E4M3* from) {
  const Bits x = LoadBytes(from);
  const Bits nan = Bits((x & 0x7f) == 0x7f) & 0x7fc00000u;
  return AsFloats(AsBits(Widened<4, 3, 7>(x)) | nan);
}

inline Floats Load(const F8E5M2* from) {
  const Bits x = LoadBytes(from);
  // Its largest exponent is that of infinity and NaN, the mantissa tells which.
  const Bits special = ((x << 24) & 0x80000000u) | 0x7f800000u | (x & 3) << 21;
  return AsFloats((x & 0x7c) == 0x7c ? special : AsBits(Widened<5, 2, 15>(x)));
}

inline Floats Load(const int8_t* from) {
  QuarterInts x;
  __builtin_memcpy(&x, from, sizeof(x));
  return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
}

// To the nearest, ties to even; NaN stays NaN.
inline void Store(Floats x, BFloat16* to) {
  const Bits bits = AsBits(x);
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Bits quiet = (bits >> 16) | 0x40;
  const HalfBits half =
      __builtin_convertvector(x == x ? rounded : quiet, HalfBits);
  __builtin_memcpy(to, &half, sizeof(half));
}

// The first n < kLanes elements, and 0 behind them.
template <typename Element>
inline Floats LoadSome(const Element* from, int64_t n) {
  Element some[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) some[i] = from[i];
  return Load(some);
}
template <typename Element>
inline void StoreSome(Floats x, Element* to, int64_t n) {
  Element some[kLanes];
  Store(x, some);
  for (int64_t i = 0; i < n; ++i) to[i] = some[i];
}

using LaneNumbers = std::make_integer_sequence<int, kLanes>;

template <int... kLane>
inline Ints Iota(std::integer_sequence<int, kLane...>) {
  return Ints{kLane...};
}
inline Ints Iota() { return Iota(LaneNumbers()); }

// Lane i gets what lane i ^ kStep had.
template <int kStep, int... kLane>
inline Floats SwapLanes(Floats x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kStep)...);
}

template <int kStep = kLanes / 2>
inline float MaxLane(Floats x) {
  if constexpr (kStep == 0) {
    return x[0];
  } else {
    return MaxLane<kStep / 2>(Max(x, SwapLanes<kStep>(x, LaneNumbers())));
  }
}

template <int kStep = kLanes / 2>
inline float SumLanes(Floats x) {
  if constexpr (kStep == 0) {
    return x[0];
  } else {
    return SumLanes<kStep / 2>(x + SwapLanes<kStep>(x, LaneNumbers()));
  }
}

// Exchanges the kStep-sized blocks off the diagonal of each 2 x 2 group.
template <int kStep, int... kLane>
inline void ExchangeBlocks(Floats& a, Floats& b,
                           std::integer_sequence<int, kLane...>) {
  const Floats upper = __builtin_shufflevector(
      a, b, ((kLane & kStep) ? kLanes + kLane - kStep : kLane)...);
  const Floats lower = __builtin_shufflevector(
      a, b, ((kLane & kStep) ? kLanes + kLane : kLane + kStep)...);
  a = upper;
  b = lower;
}

// Transposes a square in place: kLanes vectors, in log2(kLanes) rounds.
template <int kStep = kLanes / 2>
inline void Transpose(Floats (&square)[kLanes]) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStep) == 0) {
        ExchangeBlocks<kStep>(square[i], square[i + kStep], LaneNumbers());
      }
    }
    Transpose<kStep / 2>(square);
  }
}

// Lane i gets the sum of the lanes of x[i]; x is used up.
template <int kStep = kLanes / 2>
inline Floats SumEach(Floats (&x)[kLanes]) {
  if constexpr (kStep == 0) {
    return x[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kStep; ++i) {
      ExchangeBlocks<kStep>(x[i], x[i + kStep], LaneNumbers());
      x[i] += x[i + kStep];
    }
    return SumEach<kStep / 2>(x);
  }
}

// e^x for x <= 0: within 2 units in the last place, exactly 1 at 0, exactly 0
// where the result would be denormal and at -inf; NaN stays NaN.
inline Floats ExpOfNonPositive(Floats x) {
  constexpr float kLog2E = 1.44269504088896341f;
  // ln 2 in two parts: n times the first is exact.
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  // Adding it leaves the nearest integer in the low bits, without a
  // conversion that NaN could upset.
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23
  const Floats shifted = x * kLog2E + kRounder;
  const Floats n = shifted - kRounder;
  const Floats r = (x - n * kLn2High) - n * kLn2Low;
  // Taylor to r^7 on |r| <= ln 2 / 2: the next term is below 6e-9.
  Floats p = Splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Floats power = AsFloats((AsBits(shifted) << 23) + (127u << 23));
  return x < -87.3f ? Floats{} : p * power;
}

inline float ExpOfNonPositive(float x) { return ExpOfNonPositive(Splat(x))[0]; }

// Within a few units in the last place for any x.
inline Floats Tanh(Floats x) {
  const Floats magnitude = AsFloats(AsBits(x) & 0x7fffffffu);
  const Floats e = ExpOfNonPositive(magnitude * -2.0f);
  const Floats far = (1.0f - e) / (1.0f + e);
  // 1 - e cancels near 0; the series does not.
  const Floats s = x * x;
  Floats series = Splat(62.0f / 2835);
  series = series * s - 17.0f / 315;
  series = series * s + 2.0f / 15;
  series = series * s - 1.0f / 3;
  series = series * s * magnitude + magnitude;
  const Floats unsigned_tanh = magnitude < 0.25f ? series : far;
  return AsFloats(AsBits(unsigned_tanh) | (AsBits(x) & 0x80000000u));
}

}  // namespace
}  // namespace pagemill::attention

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_VECTOR_INL_H_
