// Random ragged batches for tests and benchmarks of attention, and the naive
// result in double precision.
//
// What must not be read is poisoned: dead page slots name pages far outside,
// dead pages, slots past kv_len and dead rows of q hold NaN, and so does the
// output beforehand.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_TEST_BATCH_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_TEST_BATCH_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "csrc/core/attention/kv_layout.h"
#include "csrc/core/attention/ragged_paged_attention.h"
#include "csrc/core/batch_view.h"

namespace pagemill {

struct Sequence {
  int64_t q_len;
  int64_t kv_len;
};

struct TestShape {
  std::vector<Sequence> sequences;
  int64_t num_q_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 32;
  int64_t page_size = 16;
  DType dtype = DType::kF32;
  float sm_scale = 0.2f;
  float soft_cap = 0;
  int64_t sliding_window = 0;
  bool causal = true;
  int64_t dead_rows = 3;  // of q, behind the last live token
  int64_t dead_seqs = 2;  // behind the last sequence
  KvLayout layout = KvLayout::kInterleaved;
  std::optional<DType> kv_dtype = std::nullopt;  // else dtype
  bool sinks = false;
  bool scales = false;
  int64_t tree_words = 0;  // 0: no tree mask
};

// The value of an 8-bit code, by its definition.
inline float Decoded(DType dtype, uint8_t code) {
  if (dtype == DType::kI8) return static_cast<float>(static_cast<int8_t>(code));
  const bool e4m3 = dtype == DType::kF8E4M3;
  const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const float sign = code & 0x80 ? -1.0f : 1.0f;
  if (e4m3 && (code & 0x7f) == 0x7f) return std::nanf("");
  if (!e4m3 && exponent == 31) {
    return mantissa == 0 ? sign * INFINITY : std::nanf("");
  }
  const int implicit = exponent == 0 ? 0 : 1 << mantissa_bits;
  return sign * std::ldexp(static_cast<float>(mantissa + implicit),
                           std::max(exponent, 1) - bias - mantissa_bits);
}

// An array of any dtype, read and written as float.
class Tensor {
 public:
  Tensor(DType dtype, int64_t size, float fill) : dtype_(dtype) {
    if (dtype == DType::kF32) {
      floats_.assign(size, fill);
    } else if (dtype == DType::kBF16) {
      halves_.assign(size, Narrow(fill));
    } else {
      bytes_.assign(size, Nearest(fill));
    }
  }

  int64_t size() const {
    return static_cast<int64_t>(floats_.size() + halves_.size() +
                                bytes_.size());
  }
  void* data() {
    if (dtype_ == DType::kF32) return floats_.data();
    if (dtype_ == DType::kBF16) return halves_.data();
    return bytes_.data();
  }
  float Get(int64_t i) const {
    if (dtype_ == DType::kF32) return floats_[i];
    if (dtype_ != DType::kBF16) return Decoded(dtype_, bytes_[i]);
    return std::bit_cast<float>(uint32_t{halves_[i]} << 16);
  }
  void Set(int64_t i, float x) {
    if (dtype_ == DType::kF32) {
      floats_[i] = x;
    } else if (dtype_ == DType::kBF16) {
      halves_[i] = Narrow(x);
    } else {
      bytes_[i] = Nearest(x);
    }
  }
  // The element's bits, for comparisons that tell -0 from 0 and NaN from NaN.
  uint32_t BitsAt(int64_t i) const { return std::bit_cast<uint32_t>(Get(i)); }

 private:
  // The code of the value that is nearest; int8 has no NaN and takes its least.
  uint8_t Nearest(float x) const {
    if (std::isnan(x)) return dtype_ == DType::kI8 ? 0x80 : 0x7f;
    int best = 0;
    for (int code = 1; code < 256; ++code) {
      const float value = Decoded(dtype_, static_cast<uint8_t>(code));
      const float kept = Decoded(dtype_, static_cast<uint8_t>(best));
      if (std::abs(value - x) < std::abs(kept - x)) best = code;
    }
    return static_cast<uint8_t>(best);
  }

  static uint16_t Narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (std::isnan(x)) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }

  DType dtype_;
  std::vector<float> floats_;
  std::vector<uint16_t> halves_;
  std::vector<uint8_t> bytes_;
};

class TestBatch {
 public:
  // Each sequence's numbers depend on `seed` and its `key` only, so that the
  // same sequence can be put into different batches.
  TestBatch(const TestShape& shape, uint32_t seed,
            std::vector<uint32_t> keys = {})
      : shape_(shape),
        num_tokens_(CountTokens()),
        num_pages_(CountPages() + 5),
        row_(shape.num_q_heads * shape.head_dim),
        kv_(Strides(shape)),
        kv_dtype_(shape.kv_dtype.value_or(shape.dtype)),
        q(shape.dtype, num_tokens_ * row_, kNan),
        kv_pages(kv_dtype_, num_pages_ * kv_.page, kNan),
        out(shape.dtype, num_tokens_ * row_, kNan),
        lse(num_tokens_ * shape.num_q_heads, kNan) {
    MakeExtras(seed);
    if (keys.empty()) {
      keys.resize(shape.sequences.size());
      std::iota(keys.begin(), keys.end(), 0u);
    }
    MakeMetadata(seed);
    for (int64_t s = 0; s < num_seqs(); ++s) Fill(s, seed * 7919 + keys[s]);
  }

  int64_t num_seqs() const { return std::ssize(shape_.sequences); }
  int64_t row_size() const { return row_; }
  int64_t live_rows() const { return cu_q_lens_[num_seqs()]; }
  int64_t q_begin(int64_t seq) const { return cu_q_lens_[seq]; }
  TestShape& shape() { return shape_; }

  // Where key `position` of a sequence starts; its value is ValueOffset behind.
  int64_t KeyOffset(int64_t seq, int64_t position, int64_t kv_head) const {
    const int64_t page =
        page_indices_[seq * pages_per_seq_ + position / shape_.page_size];
    return page * kv_.page + position % shape_.page_size * kv_.token +
           kv_head * kv_.head;
  }
  int64_t ValueOffset() const { return kv_.value; }

  RaggedPagedAttentionArgs Args() {
    RaggedPagedAttentionArgs args;
    args.q = q.data();
    args.kv_pages = kv_pages.data();
    args.out = out.data();
    args.lse = lse.data();
    args.dtype = shape_.dtype;
    args.kv_dtype = kv_dtype_;
    args.kv = kv_;
    if (shape_.sinks) args.sinks = sinks_.data();
    if (shape_.scales) {
      args.k_scale = k_scale_.data();
      args.v_scale = v_scale_.data();
    }
    if (shape_.tree_words > 0) args.tree_mask = tree_.data();
    args.tree_words = shape_.tree_words;
    args.batch.kv_lens = kv_lens_.data();
    args.batch.page_indices = page_indices_.data();
    args.batch.cu_q_lens = cu_q_lens_.data();
    args.batch.num_seqs = num_seqs();
    args.batch.max_num_seqs = num_seqs() + shape_.dead_seqs;
    args.batch.pages_per_seq = pages_per_seq_;
    args.batch.page_size = shape_.page_size;
    args.batch.total_num_pages = num_pages_;
    args.batch.max_num_tokens = num_tokens_;
    args.num_q_heads = shape_.num_q_heads;
    args.num_kv_heads = shape_.num_kv_heads;
    args.head_dim = shape_.head_dim;
    args.sm_scale = shape_.sm_scale;
    args.soft_cap = shape_.soft_cap;
    args.sliding_window = shape_.sliding_window;
    args.causal = shape_.causal;
    return args;
  }

  // The output's rows of a sequence, in double precision: dense, one query
  // and head at a time.
  std::vector<double> Reference(int64_t seq) const {
    const Sequence s = shape_.sequences[seq];
    std::vector<double> rows;
    for (int64_t i = 0; i < s.q_len; ++i) {
      for (int64_t head = 0; head < shape_.num_q_heads; ++head) {
        const std::vector<double> row = ReferenceRow(seq, i, head).out;
        rows.insert(rows.end(), row.begin(), row.end());
      }
    }
    return rows;
  }
  double ReferenceLse(int64_t seq, int64_t i, int64_t head) const {
    return ReferenceRow(seq, i, head).lse;
  }

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  int64_t CountTokens() const {
    int64_t tokens = shape_.dead_rows;
    for (const Sequence& s : shape_.sequences) tokens += s.q_len;
    return tokens;
  }
  int64_t PagesOf(const Sequence& s) const {
    return (s.kv_len + shape_.page_size - 1) / shape_.page_size;
  }
  int64_t CountPages() const {
    int64_t pages = 0;
    for (const Sequence& s : shape_.sequences) pages += PagesOf(s);
    return pages;
  }

  void MakeMetadata(uint32_t seed) {
    std::vector<int32_t> free_pages(num_pages_);
    std::iota(free_pages.begin(), free_pages.end(), 0);
    std::shuffle(free_pages.begin(), free_pages.end(), std::mt19937(seed));
    pages_per_seq_ = 2;
    for (const Sequence& s : shape_.sequences) {
      pages_per_seq_ = std::max(pages_per_seq_, PagesOf(s) + 1);
    }
    const int64_t rows = num_seqs() + shape_.dead_seqs;
    constexpr int32_t kPoison = 0x7ffffff0;
    kv_lens_.assign(rows, kPoison);
    page_indices_.assign(rows * pages_per_seq_, kPoison);
    cu_q_lens_.assign(rows + 1, -kPoison);
    cu_q_lens_[0] = 0;
    for (int64_t s = 0; s < num_seqs(); ++s) {
      const Sequence& sequence = shape_.sequences[s];
      kv_lens_[s] = static_cast<int32_t>(sequence.kv_len);
      cu_q_lens_[s + 1] = cu_q_lens_[s] + static_cast<int32_t>(sequence.q_len);
      for (int64_t p = 0; p < PagesOf(sequence); ++p) {
        page_indices_[s * pages_per_seq_ + p] = free_pages.back();
        free_pages.pop_back();
      }
    }
  }

  // A packed token has a row and half as many elements of padding.
  static KvStrides Strides(const TestShape& s) {
    if (s.layout == KvLayout::kPlanes) {
      return PlanesStrides(s.page_size, s.num_kv_heads, s.head_dim);
    }
    const bool packed = s.layout == KvLayout::kPacked;
    return InterleavedStrides(s.page_size, 2 * s.num_kv_heads + packed,
                              s.head_dim + (packed ? s.head_dim / 2 : 0));
  }

  void MakeExtras(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < shape_.num_q_heads; ++i) {
      sinks_.push_back(2 * normal(random));
    }
    for (int64_t i = 0; i < shape_.num_kv_heads; ++i) {
      k_scale_.push_back(0.5f + 0.1f * static_cast<float>(i));
      v_scale_.push_back(1.5f - 0.1f * static_cast<float>(i));
    }
    for (int64_t i = 0; i < num_tokens_ * shape_.tree_words; ++i) {
      tree_.push_back(static_cast<uint32_t>(random()));
    }
  }

  void Fill(int64_t seq, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const Sequence s = shape_.sequences[seq];
    for (int64_t i = 0; i < s.q_len * row_; ++i) {
      q.Set(cu_q_lens_[seq] * row_ + i, normal(random));
    }
    for (int64_t t = 0; t < s.kv_len; ++t) {
      for (int64_t head = 0; head < shape_.num_kv_heads; ++head) {
        const int64_t key = KeyOffset(seq, t, head);
        for (const int64_t begin : {key, key + kv_.value}) {
          for (int64_t d = 0; d < shape_.head_dim; ++d) {
            kv_pages.Set(begin + d, normal(random));
          }
        }
      }
    }
  }

  bool InTree(int64_t token, int64_t number) const {
    if (number < 0) return true;
    return number < 32 * shape_.tree_words &&
           (tree_[token * shape_.tree_words + number / 32] >> (number % 32) &
            1) != 0;
  }

  bool Sees(int64_t seq, int64_t i, int64_t key) const {
    const Sequence& s = shape_.sequences[seq];
    const int64_t first_new = s.kv_len - s.q_len, position = first_new + i;
    const bool ordered = shape_.tree_words > 0
                             ? InTree(cu_q_lens_[seq] + i, key - first_new)
                             : !shape_.causal || key <= position;
    return ordered && (shape_.sliding_window == 0 ||
                       key > position - shape_.sliding_window);
  }

  double Logit(int64_t seq, int64_t i, int64_t head, int64_t key) const {
    const int64_t group = shape_.num_q_heads / shape_.num_kv_heads;
    const int64_t k = KeyOffset(seq, key, head / group);
    const int64_t from =
        ((cu_q_lens_[seq] + i) * shape_.num_q_heads + head) * shape_.head_dim;
    double dot = 0;
    for (int64_t d = 0; d < shape_.head_dim; ++d) {
      dot += double{q.Get(from + d)} * kv_pages.Get(k + d);
    }
    dot *= shape_.sm_scale;
    if (shape_.scales) dot *= k_scale_[head / group];
    const double cap = shape_.soft_cap;
    return cap == 0 ? dot : cap * std::tanh(dot / cap);
  }

  struct Row {
    std::vector<double> out;
    double lse = -INFINITY;
  };

  Row ReferenceRow(int64_t seq, int64_t i, int64_t head) const {
    const Sequence s = shape_.sequences[seq];
    const int64_t group = shape_.num_q_heads / shape_.num_kv_heads;
    std::vector<int64_t> keys;
    std::vector<double> logits;
    for (int64_t key = 0; key < s.kv_len; ++key) {
      if (!Sees(seq, i, key)) continue;
      keys.push_back(key);
      logits.push_back(Logit(seq, i, head, key));
    }
    Row row;
    row.out.assign(shape_.head_dim, 0.0);
    const double sink = shape_.sinks ? double{sinks_[head]} : -INFINITY;
    const double max =
        keys.empty()
            ? sink
            : std::max(sink, *std::max_element(logits.begin(), logits.end()));
    if (max == -INFINITY) return row;
    double total = std::exp(sink - max);
    for (double& x : logits) total += x = std::exp(x - max);
    for (size_t j = 0; j < keys.size(); ++j) {
      const int64_t v = KeyOffset(seq, keys[j], head / group) + kv_.value;
      const double scale = shape_.scales ? double{v_scale_[head / group]} : 1.0;
      for (int64_t d = 0; d < shape_.head_dim; ++d) {
        row.out[d] += logits[j] / total * kv_pages.Get(v + d) * scale;
      }
    }
    row.lse = max + std::log(total);
    return row;
  }

  TestShape shape_;
  int64_t num_tokens_;
  int64_t num_pages_;
  int64_t row_;
  int64_t pages_per_seq_ = 0;
  std::vector<int32_t> kv_lens_;
  std::vector<int32_t> page_indices_;
  std::vector<int32_t> cu_q_lens_;
  KvStrides kv_;
  DType kv_dtype_;
  std::vector<float> sinks_;
  std::vector<float> k_scale_;
  std::vector<float> v_scale_;
  std::vector<uint32_t> tree_;  // [T, tree_words]

 public:
  Tensor q;                // [T, num_q_heads, head_dim]
  Tensor kv_pages;         // of the layout
  Tensor out;              // as q
  std::vector<float> lse;  // [T, num_q_heads]
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_TEST_BATCH_H_
