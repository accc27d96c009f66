// Memory in huge pages, where the system has them: for what is touched all
// over, and costs more to find than to read.
#ifndef PAGEMILL_CSRC_CORE_HUGE_PAGES_H_
#define PAGEMILL_CSRC_CORE_HUGE_PAGES_H_

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory_resource>
#include <new>

namespace pagemill {

inline constexpr size_t kHugePage = size_t{1} << 21;

// At least `bytes`, aligned to a huge page if they fill one, else to
// `alignment`.  Not initialised; for std::free.
inline void* AllocateHuge(size_t bytes, size_t alignment) {
  const size_t aligned = bytes < kHugePage ? alignment : kHugePage;
  const size_t rounded = (bytes + aligned) / aligned * aligned;
  void* memory = std::aligned_alloc(aligned, rounded);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (aligned == kHugePage) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  return memory;
}

// Asks for huge pages where memory that somebody else has allocated spans them.
inline void AdviseHuge(void* memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr size_t kPage = 4096;
  const size_t skipped =
      (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage;
  if (bytes < kHugePage) return;
  madvise(static_cast<char*>(memory) + skipped,
          (bytes - skipped) / kPage * kPage, MADV_HUGEPAGE);
#else
  (void)memory;
  (void)bytes;
#endif
}

// For std::pmr: hands AllocateHuge's memory on.
class HugePageResource : public std::pmr::memory_resource {
 private:
  void* do_allocate(size_t bytes, size_t alignment) override {
    return AllocateHuge(bytes, alignment);
  }
  void do_deallocate(void* memory, size_t, size_t) override {
    std::free(memory);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override {
    return dynamic_cast<const HugePageResource*>(&other) != nullptr;
  }
};

// Many short lists: of equal sizes side by side, in few large pieces.  Memory
// of lists that are gone is kept for others.
class ListMemory {
 public:
  std::pmr::memory_resource* resource() { return &lists_; }

 private:
  HugePageResource huge_;
  std::pmr::monotonic_buffer_resource pieces_{2 * kHugePage, &huge_};
  std::pmr::unsynchronized_pool_resource lists_{
      std::pmr::pool_options{.max_blocks_per_chunk = 1 << 16,
                             .largest_required_pool_block = 1 << 16},
      &pieces_};
};

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_CORE_HUGE_PAGES_H_
