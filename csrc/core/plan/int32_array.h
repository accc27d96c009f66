// int32 memory on a cache line's border, which JAX can take without a copy.
#ifndef PAGEMILL_CSRC_CORE_PLAN_INT32_ARRAY_H_
#define PAGEMILL_CSRC_CORE_PLAN_INT32_ARRAY_H_

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace pagemill {

class Int32Array {
 public:
  static constexpr size_t kAlignment = 128;
  static constexpr size_t kHugePage = size_t{1} << 21;

  // Not initialised.
  explicit Int32Array(int64_t size = 0) : size_(size) {
    const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
    const size_t alignment = bytes < kHugePage ? kAlignment : kHugePage;
    const size_t rounded = (bytes + alignment) / alignment * alignment;
    data_.reset(static_cast<int32_t*>(std::aligned_alloc(alignment, rounded)));
    if (data_ == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    // A step writes to one line of each of hundreds of table rows.
    if (alignment == kHugePage) madvise(data_.get(), rounded, MADV_HUGEPAGE);
#endif
  }

  void Fill(int32_t value) { std::fill_n(data(), size_, value); }
  int32_t* data() { return data_.get(); }
  const int32_t* data() const { return data_.get(); }
  int64_t size() const { return size_; }
  int32_t& operator[](int64_t i) { return data_[i]; }
  int32_t operator[](int64_t i) const { return data_[i]; }

 private:
  struct Free {
    void operator()(int32_t* p) const { std::free(p); }
  };
  std::unique_ptr<int32_t[], Free> data_;
  int64_t size_;
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_PLAN_INT32_ARRAY_H_
