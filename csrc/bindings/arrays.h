// numpy arrays in and out.
#ifndef PAGEMILL_CSRC_BINDINGS_ARRAYS_H_
#define PAGEMILL_CSRC_BINDINGS_ARRAYS_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

namespace pagemill::bindings {

// Read in place: contiguous host memory, writeable or not.
template <typename T, int kRank>
using Input = nanobind::ndarray<const T, nanobind::ndim<kRank>,
                                nanobind::c_contig, nanobind::device::cpu>;

template <int kRank>
using Int32Output =
    nanobind::ndarray<nanobind::numpy, int32_t, nanobind::ndim<kRank>>;

// A numpy array over memory that `owner` keeps and gives up with the array.
template <int kRank, typename Owner>
Int32Output<kRank> TakeOver(Owner owner, std::initializer_list<size_t> shape) {
  auto kept = std::make_unique<Owner>(std::move(owner));
  int32_t* data = kept->data();
  nanobind::capsule deleter(
      kept.release(), [](void* p) noexcept { delete static_cast<Owner*>(p); });
  return Int32Output<kRank>(data, shape, deleter);
}

}  // namespace pagemill::bindings

#endif  // PAGEMILL_CSRC_BINDINGS_ARRAYS_H_
