// RowOrder: which row of a batch each request gets.
//
// Decodes first, then prefill chunks of one length, then the rest.  Within
// these the requests' order is kept; or, with keep_rows, a sequence keeps the
// row it had in the step before, so that its page table row need not move, and
// the others fill the rows left in their own order.
#ifndef PAGEMILL_CSRC_CORE_PLAN_ROW_ORDER_H_
#define PAGEMILL_CSRC_CORE_PLAN_ROW_ORDER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "csrc/core/pool/sequence.h"

namespace pagemill {

class RowOrder {
 public:
  // prefill_chunk: the length that makes a row a prefill row; 0 for none.
  RowOrder(int64_t prefill_chunk, bool keep_rows)
      : prefill_chunk_(prefill_chunk), keep_rows_(keep_rows) {}

  // Row r is for request order()[r].  ones: all counts are 1.
  void Assign(std::span<const SequenceHandle> handles,
              std::span<const int32_t> counts, bool ones);
  // The assigned rows are those of a step: the next one starts from them.
  void Accept(std::span<const SequenceHandle> handles);

  std::span<const int32_t> order() const { return order_; }
  // Changes with the requests, their rows, or what they bring.
  int64_t version() const { return version_; }
  // All are decodes, as in the accepted step before, of the same requests.
  bool repeated() const { return repeated_; }
  int32_t decode_end() const { return ends_[0]; }
  int32_t prefill_end() const { return ends_[1]; }

 private:
  static constexpr size_t kKinds = 3;

  size_t KindOf(int32_t count) const {
    return count == 1 ? 0 : count == prefill_chunk_ ? 1 : 2;
  }
  int32_t PreviousRow(SequenceHandle handle) const;

  const int64_t prefill_chunk_;
  const bool keep_rows_;
  std::vector<int32_t> order_;
  std::array<int32_t, kKinds> ends_{};
  std::array<std::vector<int32_t>, kKinds> waiting_;
  // The accepted step's.
  std::vector<SequenceHandle> requests_, rows_;
  std::vector<int32_t> row_of_slot_;
  bool decodes_only_ = false;
  int64_t version_ = 0;
  bool accepted_ = false;  // order_ is that step's
  bool repeated_ = false;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_ROW_ORDER_H_
