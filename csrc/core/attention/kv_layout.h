// Where keys and values lie in the pages of a KV cache.
#ifndef PAGEMILL_CSRC_CORE_ATTENTION_KV_LAYOUT_H_
#define PAGEMILL_CSRC_CORE_ATTENTION_KV_LAYOUT_H_

#include <cstdint>

namespace pagemill {

// The order is that of the Python enum.
enum class KvLayout {
  kInterleaved,  // [N, page_size, 2 * Hkv, D]: K at even, V at odd heads
  kPacked,       // the same heads and dims, padded: [N, page_size, C, pack, D]
  kPlanes,       // [N, 2, Hkv, page_size, D]: K, then V
};

// Distances in elements.
struct KvStrides {
  int64_t page = 0;
  int64_t token = 0;  // within a page
  int64_t head = 0;
  int64_t value = 0;  // from a key to its value
};

// Of kInterleaved, and of kPacked, whose `rows` of a token (two per head) and
// `dim` are padded.
constexpr KvStrides InterleavedStrides(int64_t page_size, int64_t rows,
                                       int64_t dim) {
  return {page_size * rows * dim, rows * dim, 2 * dim, dim};
}
constexpr KvStrides PlanesStrides(int64_t page_size, int64_t heads,
                                  int64_t dim) {
  return {2 * heads * page_size * dim, dim, page_size * dim,
          heads * page_size * dim};
}

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_ATTENTION_KV_LAYOUT_H_
