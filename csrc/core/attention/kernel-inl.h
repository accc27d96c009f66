// The attention of one item, compiled once per instruction set: the including
// file defines PAGEMILL_ISA and PAGEMILL_VECTOR_BYTES.  Everything but Run is
// in an unnamed namespace, so that no two instruction sets share a function.
//
// Stages per block of kBlock keys: pack K and V as float32, scores, mask and
// softmax, accumulate.  Columns of a block that no row of the item sees are
// never read: they are packed as zeros.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "csrc/core/attention/kernel.h"
#include "csrc/core/attention/vector-inl.h"

namespace pagemill::attention::PAGEMILL_ISA {
namespace {

constexpr int64_t kBlock = 64;    // keys at a time
constexpr int64_t kTileRows = 4;  // rows of a register tile
constexpr int64_t kTileVecs = 4;  // vectors of a register tile
static_assert(kBlock % (kTileVecs * 16) == 0);

// Where K is packed key by key rather than transposed: fewer rows than this do
// not pay for the transposition.
constexpr int64_t kFewRows = 8;

inline float ToFloat(float x) { return x; }
inline float ToFloat(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

inline void FromFloat(float x, float* out) { *out = x; }
inline void FromFloat(float x, uint16_t* out) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  if (x != x) {
    *out = static_cast<uint16_t>((bits >> 16) | 0x40);  // stays a NaN
    return;
  }
  *out = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// A thread's buffers, kept between calls.
struct Scratch {
  std::vector<float> q, k, v, scores, acc, max, sum;

  static Scratch& OfThread() {
    thread_local Scratch scratch;
    return scratch;
  }
  static void Grow(std::vector<float>& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  }
};

template <typename T>
class ItemRunner {
 public:
  ItemRunner(const RaggedPagedAttentionArgs& args, const Item& item)
      : a_(args),
        item_(item),
        group_(args.num_q_heads / args.num_kv_heads),
        rows_(item.q_count * group_),
        padded_rows_(RoundUp(rows_, kTileRows)),
        width_(RoundUp(args.head_dim, kTileVecs * kLanes)),
        few_(rows_ < kFewRows),
        s_(Scratch::OfThread()) {
    const int64_t q_len = args.batch.q_len(item.seq);
    const int64_t first = item.q_begin - args.batch.q_begin(item.seq);
    kv_len_ = args.batch.kv_len(item.seq);
    position_ = kv_len_ - q_len + first;
    Scratch::Grow(s_.q, padded_rows_ * width_);
    Scratch::Grow(s_.k, kBlock * width_);
    Scratch::Grow(s_.v, kBlock * width_);
    Scratch::Grow(s_.scores, padded_rows_ * kBlock);
    Scratch::Grow(s_.acc, padded_rows_ * width_);
    Scratch::Grow(s_.max, padded_rows_);
    Scratch::Grow(s_.sum, padded_rows_);
  }

  void Run() {
    LoadQueries();
    std::fill_n(s_.acc.data(), padded_rows_ * width_, 0.0f);
    std::fill_n(s_.max.data(), padded_rows_, -kInfinity);
    std::fill_n(s_.sum.data(), padded_rows_, 0.0f);
    // Keys that any row sees.
    const int64_t begin = First(0), end = End(item_.q_count - 1);
    for (int64_t base = begin / kBlock * kBlock; base < end; base += kBlock) {
      const int64_t from = std::max(begin, base);
      const int64_t to = std::min(end, base + kBlock);
      Pack(base, from, to);
      if (few_) {
        ScoreByKey(to - base);
      } else {
        ScoreByTile();
      }
      for (int64_t row = 0; row < rows_; ++row) Softmax(row, base);
      Accumulate(to - base);
    }
    StoreOutputs();
  }

 private:
  // Visible keys of the item's query i: [First(i), End(i)).
  int64_t First(int64_t i) const {
    return a_.sliding_window == 0
               ? 0
               : std::max<int64_t>(position_ + i + 1 - a_.sliding_window, 0);
  }
  int64_t End(int64_t i) const {
    return a_.causal ? std::min(position_ + i + 1, kv_len_) : kv_len_;
  }

  int64_t RowOffset(int64_t row) const {
    const int64_t token = item_.q_begin + row / group_;
    const int64_t head = item_.kv_head * group_ + row % group_;
    return (token * a_.num_q_heads + head) * a_.head_dim;
  }

  void LoadQueries() {
    std::fill_n(s_.q.data(), padded_rows_ * width_, 0.0f);
    for (int64_t row = 0; row < rows_; ++row) {
      const T* from = static_cast<const T*>(a_.q) + RowOffset(row);
      float* to = s_.q.data() + row * width_;
      for (int64_t d = 0; d < a_.head_dim; ++d) to[d] = ToFloat(from[d]);
    }
  }

  // K of the token at `position`; V follows a head_dim later.
  const T* Key(int64_t position) const {
    const BatchView& b = a_.batch;
    const int64_t page = b.pages(item_.seq)[position / b.page_size];
    const int64_t slot = page * b.page_size + position % b.page_size;
    return static_cast<const T*>(a_.kv_pages) +
           (slot * 2 * a_.num_kv_heads + 2 * item_.kv_head) * a_.head_dim;
  }

  // Keys [from, to) into columns from - base on; other columns are 0.
  void Pack(int64_t base, int64_t from, int64_t to) {
    const bool whole = from == base && to == base + kBlock;
    if (!whole || width_ != a_.head_dim) {
      std::fill_n(s_.k.data(), kBlock * width_, 0.0f);
      std::fill_n(s_.v.data(), kBlock * width_, 0.0f);
    }
    for (int64_t position = from; position < to; ++position) {
      const int64_t column = position - base;
      const T* key = Key(position);
      const T* value = key + a_.head_dim;
      float* v = s_.v.data() + column * width_;
      if (few_) {
        float* k = s_.k.data() + column * width_;
        for (int64_t d = 0; d < a_.head_dim; ++d) k[d] = ToFloat(key[d]);
      } else {
        float* k = s_.k.data() + column;
        for (int64_t d = 0; d < a_.head_dim; ++d) {
          k[d * kBlock] = ToFloat(key[d]);
        }
      }
      for (int64_t d = 0; d < a_.head_dim; ++d) v[d] = ToFloat(value[d]);
    }
  }

  // scores[row][column] = q[row] . k[column], K as it lies.
  void ScoreByKey(int64_t columns) {
    for (int64_t column = 0; column < columns; column += kTileRows) {
      for (int64_t row = 0; row < padded_rows_; row += kTileRows) {
        Vec sums[kTileRows][kTileRows] = {};
        for (int64_t d = 0; d < width_; d += kLanes) {
          Vec k[kTileRows];
          for (int64_t j = 0; j < kTileRows; ++j) {
            k[j] = Load(s_.k.data() + (column + j) * width_ + d);
          }
          for (int64_t i = 0; i < kTileRows; ++i) {
            const Vec q = Load(s_.q.data() + (row + i) * width_ + d);
            for (int64_t j = 0; j < kTileRows; ++j) sums[i][j] += q * k[j];
          }
        }
        for (int64_t i = 0; i < kTileRows; ++i) {
          float* scores = s_.scores.data() + (row + i) * kBlock + column;
          for (int64_t j = 0; j < kTileRows; ++j) {
            scores[j] = HorizontalSum(sums[i][j]);
          }
        }
      }
    }
  }

  // out[i][j] (+)= sum over x of left[i][x] * right[x][j], for a tile.
  static void Tile(const float* left, int64_t left_stride, const float* right,
                   int64_t right_stride, int64_t depth, float* out,
                   int64_t out_stride, bool add) {
    Vec sums[kTileRows][kTileVecs] = {};
    if (add) {
      for (int64_t i = 0; i < kTileRows; ++i) {
        for (int64_t j = 0; j < kTileVecs; ++j) {
          sums[i][j] = Load(out + i * out_stride + j * kLanes);
        }
      }
    }
    for (int64_t x = 0; x < depth; ++x) {
      Vec r[kTileVecs];
      for (int64_t j = 0; j < kTileVecs; ++j) {
        r[j] = Load(right + x * right_stride + j * kLanes);
      }
      for (int64_t i = 0; i < kTileRows; ++i) {
        const Vec l = Splat(left[i * left_stride + x]);
        for (int64_t j = 0; j < kTileVecs; ++j) sums[i][j] += l * r[j];
      }
    }
    for (int64_t i = 0; i < kTileRows; ++i) {
      for (int64_t j = 0; j < kTileVecs; ++j) {
        Store(out + i * out_stride + j * kLanes, sums[i][j]);
      }
    }
  }

  // The same scores from K transposed.
  void ScoreByTile() {
    for (int64_t row = 0; row < padded_rows_; row += kTileRows) {
      for (int64_t column = 0; column < kBlock; column += kTileVecs * kLanes) {
        Tile(s_.q.data() + row * width_, width_, s_.k.data() + column, kBlock,
             a_.head_dim, s_.scores.data() + row * kBlock + column, kBlock,
             false);
      }
    }
  }

  // Scales, caps and masks a row's scores; turns them into weights; rescales
  // what the row has summed up so far.
  void Softmax(int64_t row, int64_t base) {
    float* scores = s_.scores.data() + row * kBlock;
    const int64_t query = row / group_;
    const int64_t from = std::clamp<int64_t>(First(query) - base, 0, kBlock);
    const int64_t to = std::clamp<int64_t>(End(query) - base, from, kBlock);
    std::fill(scores, scores + from, -kInfinity);
    std::fill(scores + to, scores + kBlock, -kInfinity);
    Vec highest = Splat(-kInfinity);
    for (int64_t c = 0; c < kBlock; c += kLanes) {
      Vec s = Load(scores + c);
      const Vec masked = Splat(-kInfinity);
      const IntVec live = s != masked;
      s *= a_.sm_scale;
      if (a_.soft_cap != 0) s = Tanh(s / a_.soft_cap) * a_.soft_cap;
      s = live ? s : masked;
      highest = Max(highest, s);
      Store(scores + c, s);
    }
    const float max = std::max(s_.max[row], HorizontalMax(highest));
    if (max == -kInfinity) {  // No key yet: weights 0, not exp(-inf + inf).
      std::fill_n(scores, kBlock, 0.0f);
      return;
    }
    Vec sum = {};
    for (int64_t c = 0; c < kBlock; c += kLanes) {
      const Vec weight = ExpNonPositive(Load(scores + c) - max);
      sum += weight;
      Store(scores + c, weight);
    }
    if (max != s_.max[row]) Rescale(row, max);
    s_.sum[row] += HorizontalSum(sum);
  }

  void Rescale(int64_t row, float max) {
    const float factor = ExpNonPositive(Splat(s_.max[row] - max))[0];
    s_.max[row] = max;
    s_.sum[row] *= factor;
    float* acc = s_.acc.data() + row * width_;
    for (int64_t d = 0; d < width_; d += kLanes) {
      Store(acc + d, Load(acc + d) * factor);
    }
  }

  void Accumulate(int64_t columns) {
    // Rows that only pad a tile have no weights.
    std::fill(s_.scores.data() + rows_ * kBlock,
              s_.scores.data() + padded_rows_ * kBlock, 0.0f);
    for (int64_t row = 0; row < padded_rows_; row += kTileRows) {
      for (int64_t d = 0; d < width_; d += kTileVecs * kLanes) {
        Tile(s_.scores.data() + row * kBlock, kBlock, s_.v.data() + d, width_,
             columns, s_.acc.data() + row * width_ + d, width_, true);
      }
    }
  }

  void StoreOutputs() {
    for (int64_t row = 0; row < rows_; ++row) {
      T* out = static_cast<T*>(a_.out) + RowOffset(row);
      const float* acc = s_.acc.data() + row * width_;
      const float scale = s_.sum[row] == 0 ? 0 : 1 / s_.sum[row];
      for (int64_t d = 0; d < a_.head_dim; ++d) {
        FromFloat(acc[d] * scale, out + d);
      }
    }
  }

  const RaggedPagedAttentionArgs& a_;
  const Item& item_;
  const int64_t group_;
  const int64_t rows_;
  const int64_t padded_rows_;
  const int64_t width_;  // head_dim rounded up to a register tile
  const bool few_;
  Scratch& s_;
  int64_t kv_len_;
  int64_t position_;  // of the item's first query
};

}  // namespace

void Run(const RaggedPagedAttentionArgs& args, const Item& item) {
  switch (args.dtype) {
    case DType::kF32:
      return ItemRunner<float>(args, item).Run();
    case DType::kBF16:
      return ItemRunner<uint16_t>(args, item).Run();
  }
}

}  // namespace pagemill::attention::PAGEMILL_ISA
