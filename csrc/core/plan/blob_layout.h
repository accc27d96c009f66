// BlobLayout: where each array of a step lies in one piece of memory.
#ifndef PAGEMILL_CSRC_CORE_PLAN_BLOB_LAYOUT_H_
#define PAGEMILL_CSRC_CORE_PLAN_BLOB_LAYOUT_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace pagemill {

struct PlanSizes {
  int64_t max_num_tokens = 0;
  int64_t max_num_seqs = 0;
  int64_t pages_per_seq = 0;
};

enum class Field : uint8_t {
  kNumSeqs,        // [1]
  kDistribution,   // [3]
  kKvLens,         // [S]
  kCuQLens,        // [S + 1]
  kLogitsIndices,  // [S]: the last token of each row
  kPositions,      // [T]
  kSlotMapping,    // [groups, T]
  kPageIndices,    // [groups, S, P]
};
inline constexpr size_t kNumFields = 8;

// Offsets and sizes in int32s.  Every array begins on a cache line of its own;
// the page tables come last.
class BlobLayout {
 public:
  struct Span {
    int64_t offset;
    int64_t size;
  };

  BlobLayout(const PlanSizes& sizes, int64_t groups) {
    const int64_t seqs = sizes.max_num_seqs, tokens = sizes.max_num_tokens;
    const std::array<int64_t, kNumFields> lengths = {
        1,
        3,
        seqs,
        seqs + 1,
        seqs,
        tokens,
        groups * tokens,
        groups * seqs * sizes.pages_per_seq};
    for (size_t i = 0; i < kNumFields; ++i) {
      spans_[i] = {size_, lengths[i]};
      size_ += (lengths[i] + kLine - 1) / kLine * kLine;
    }
  }

  const Span& operator[](Field field) const {
    return spans_[static_cast<size_t>(field)];
  }
  int64_t size() const { return size_; }

 private:
  static constexpr int64_t kLine = 32;

  std::array<Span, kNumFields> spans_{};
  int64_t size_ = 0;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_BLOB_LAYOUT_H_
