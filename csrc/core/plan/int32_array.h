// int32 memory on a cache line's border, which JAX can take without a copy.
#ifndef PAGEMILL_CSRC_CORE_PLAN_INT32_ARRAY_H_
#define PAGEMILL_CSRC_CORE_PLAN_INT32_ARRAY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "csrc/core/huge_pages.h"

namespace pagemill {

class Int32Array {
 public:
  static constexpr size_t kAlignment = 128;

  // Not initialised.
  explicit Int32Array(int64_t size = 0) : size_(size) {
    const size_t bytes = static_cast<size_t>(size) * sizeof(int32_t);
    data_.reset(static_cast<int32_t*>(AllocateHuge(bytes, kAlignment)));
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
