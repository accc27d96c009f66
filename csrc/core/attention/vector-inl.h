// float32 vectors of the including file's width, and the functions softmax
// needs of them.  Included once per instruction set: no include guard, no
// inline functions that the linker could merge across instruction sets.

namespace pagemill::attention::PAGEMILL_ISA {
namespace {

constexpr int64_t kLanes = PAGEMILL_VECTOR_BYTES / sizeof(float);
typedef float Vec __attribute__((vector_size(PAGEMILL_VECTOR_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(PAGEMILL_VECTOR_BYTES)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline Vec Load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline void Store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

inline Vec Splat(float x) { return x - Vec{}; }

inline Vec Max(Vec a, Vec b) { return a > b ? a : b; }

inline float HorizontalSum(Vec v) {
  float sum = 0;
  for (int64_t i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

inline float HorizontalMax(Vec v) {
  float max = v[0];
  for (int64_t i = 1; i < kLanes; ++i) max = v[i] > max ? v[i] : max;
  return max;
}

// exp of x <= 0, to about 2 ulp; exactly 0 below -87, -inf included.
inline Vec ExpNonPositive(Vec x) {
  const Vec round = Splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const Vec clamped = Max(x, Splat(-87.0f));
  const Vec n = (clamped * 1.44269504f + round) - round;
  // The two-part product keeps the remainder exact.
  const Vec f = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = Splat(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f,
                        1.0f, 1.0f}) {
    p = p * f + c;
  }
  const IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return x < -87.0f ? Vec{} : p * scale;
}

// tanh: a series where exp would cancel, exp elsewhere.
inline Vec Tanh(Vec y) {
  const Vec magnitude = Max(y, -y);
  const Vec e = ExpNonPositive(magnitude * -2.0f);
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec y2 = y * y;
  Vec series = Splat(21844.0f / 6081075);
  for (const float c : {-1382.0f / 155925, 62.0f / 2835, -17.0f / 315,
                        2.0f / 15, -1.0f / 3, 1.0f}) {
    series = series * y2 + c;
  }
  return magnitude < 0.35f ? y * series : (y < 0.0f ? -far : far);
}

}  // namespace
}  // namespace pagemill::attention::PAGEMILL_ISA
