// PageGeometry: tokens to page slots and back.
#ifndef PAGEMILL_CSRC_CORE_POOL_GEOMETRY_H_
#define PAGEMILL_CSRC_CORE_POOL_GEOMETRY_H_

#include <bit>
#include <cstdint>

namespace pagemill {

// Small: hot loops copy it, so that the compiler keeps it in registers.
class PageGeometry {
 public:
  // 0 < page_size < 2^31.
  explicit PageGeometry(int64_t page_size)
      : page_size_(page_size),
        shift_(std::has_single_bit(static_cast<uint64_t>(page_size))
                   ? std::countr_zero(static_cast<uint64_t>(page_size))
                   : -1) {}

  int64_t page_size() const { return page_size_; }
  // Slots that `length` tokens fill; the slot of position `length`.
  int64_t FullSlots(int64_t length) const {
    return shift_ >= 0 ? length >> shift_ : length / page_size_;
  }
  // Slots that `length` tokens need.
  int64_t SlotsFor(int64_t length) const {
    return FullSlots(length + page_size_ - 1);
  }
  // Tokens in the slot that is partly filled.
  int64_t Remainder(int64_t length) const {
    return shift_ >= 0 ? length & (page_size_ - 1) : length % page_size_;
  }
  // No slot is partly filled.
  bool IsFull(int64_t length) const { return Remainder(length) == 0; }

 private:
  int64_t page_size_;
  int shift_;  // log2 of page_size, or -1
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_POOL_GEOMETRY_H_
