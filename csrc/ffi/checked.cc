#include "csrc/ffi/checked.h"

#include <cstdint>
#include <string_view>
#include <vector>

#include "csrc/core/batch_view.h"
#include "csrc/core/status.h"
#include "csrc/core/validate.h"
#include "csrc/ffi/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace pagemill {
namespace {

namespace ffi = xla::ffi;

struct Batch {
  Metadata metadata;
  ffi::AnyBuffer distribution;  // i32[3] or i32[0]
  ffi::AnyBuffer slot_mapping;  // i32[T] or i32[0]
  int64_t page_size;
  int64_t total_num_pages;
  int64_t max_num_tokens;
  int64_t sliding_window;
};

Status CheckOptional(std::string_view name, const ffi::AnyBuffer& buffer,
                     int64_t entries, std::string_view reason) {
  const Status kind = FirstFailure(
      {CheckRank(name, buffer, 1), CheckDType(name, buffer, ffi::S32, "")});
  if (!kind.ok() || buffer.element_count() == 0) return kind;
  return CheckEntries(name, buffer, entries, reason);
}

const int32_t* DataOrNull(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0 ? nullptr : buffer.typed_data<int32_t>();
}

BatchView View(const Batch& b) {
  const Metadata& m = b.metadata;
  return {.kv_lens = m.kv_lens.typed_data<int32_t>(),
          .page_indices = m.page_indices.typed_data<int32_t>(),
          .cu_q_lens = m.cu_q_lens.typed_data<int32_t>(),
          .distribution = DataOrNull(b.distribution),
          .slot_mapping = DataOrNull(b.slot_mapping),
          .num_seqs = m.num_seqs.typed_data<int32_t>()[0],
          .max_num_seqs = m.page_indices.dimensions()[0],
          .pages_per_seq = m.page_indices.dimensions()[1],
          .page_size = b.page_size,
          .total_num_pages = b.total_num_pages,
          .max_num_tokens = b.max_num_tokens,
          .sliding_window = b.sliding_window};
}

Status Check(const Batch& batch, Level level, const ffi::AnyBuffer& code) {
  const Status shapes = FirstFailure(
      {CheckMetadata(batch.metadata),
       CheckOptional("distribution", batch.distribution, 3,
                     "the ends of the decode, prefill and mixed rows"),
       CheckOptional("slot_mapping", batch.slot_mapping, batch.max_num_tokens,
                     "one per row of the token buffer"),
       CheckRank("code", code, 1), CheckDType("code", code, ffi::S32, "")});
  if (!shapes.ok()) return shapes;
  const Status one = CheckEntries("code", code, 1, "the codes' bit mask");
  if (!one.ok()) return one;
  const std::vector<Violation> violations = Validate(View(batch), level);
  if (!violations.empty()) {
    return InvalidArgument(FormatViolations(violations));
  }
  code.typed_data<int32_t>()[0] = 0;
  return Status();
}

ffi::Error CheckedHandler(ffi::AnyBuffer num_seqs, ffi::AnyBuffer kv_lens,
                          ffi::AnyBuffer page_indices, ffi::AnyBuffer cu_q_lens,
                          ffi::AnyBuffer distribution,
                          ffi::AnyBuffer slot_mapping,
                          ffi::Result<ffi::AnyBuffer> code, int64_t page_size,
                          int64_t total_num_pages, int64_t max_num_tokens,
                          bool full, int64_t sliding_window) {
  return ToError(Check({.metadata = {.kv_lens = kv_lens,
                                     .page_indices = page_indices,
                                     .cu_q_lens = cu_q_lens,
                                     .num_seqs = num_seqs},
                        .distribution = distribution,
                        .slot_mapping = slot_mapping,
                        .page_size = page_size,
                        .total_num_pages = total_num_pages,
                        .max_num_tokens = max_num_tokens,
                        .sliding_window = sliding_window},
                       full ? Level::kFull : Level::kStructure, *code));
}

}  // namespace
}  // namespace pagemill

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagemillChecked, pagemill::CheckedHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()  // num_seqs
                                  .Arg<xla::ffi::AnyBuffer>()  // kv_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // page_indices
                                  .Arg<xla::ffi::AnyBuffer>()  // cu_q_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // distribution
                                  .Arg<xla::ffi::AnyBuffer>()  // slot_mapping
                                  .Ret<xla::ffi::AnyBuffer>()  // code
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("total_num_pages")
                                  .Attr<int64_t>("max_num_tokens")
                                  .Attr<bool>("full")
                                  .Attr<int64_t>("sliding_window"));
