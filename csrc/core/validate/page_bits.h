// A bit per page, all 0 between uses, so that a use clears only what it set.
#ifndef PAGEMILL_CSRC_CORE_VALIDATE_PAGE_BITS_H_
#define PAGEMILL_CSRC_CORE_VALIDATE_PAGE_BITS_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace pagemill::internal {

class PageBits {
 public:
  // For pages below `total_num_pages`.
  void Reserve(int64_t total_num_pages) {
    const int64_t words = (total_num_pages + 31) / 32;
    if (words <= words_) return;
    // Untouched, calloc's memory costs nothing, however large the pool.
    words_ = 0;
    bits_.reset(static_cast<uint32_t*>(
        std::calloc(static_cast<size_t>(words), sizeof(uint32_t))));
    if (bits_ == nullptr) throw std::bad_alloc();
    words_ = words;
  }

  const uint32_t* words() const { return bits_.get(); }

  bool Test(uint32_t page) const {
    return (bits_[page / 32] >> (page % 32) & 1) != 0;
  }
  // False when it was set.
  bool Set(uint32_t page) {
    uint32_t& word = bits_[page / 32];
    const uint32_t bit = uint32_t{1} << (page % 32);
    const bool first = (word & bit) == 0;
    word |= bit;
    return first;
  }
  void Clear(uint32_t page) {
    bits_[page / 32] &= ~(uint32_t{1} << (page % 32));
  }
  // Clears neighbours as well: for clearing all that was set.
  void ClearAround(uint32_t page) { bits_[page / 32] = 0; }

 private:
  struct Free {
    void operator()(uint32_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint32_t[], Free> bits_;
  int64_t words_ = 0;
};

}  // namespace pagemill::internal

#endif  // PAGEMILL_CSRC_CORE_VALIDATE_PAGE_BITS_H_
