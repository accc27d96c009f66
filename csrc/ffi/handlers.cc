#include "csrc/ffi/handlers.h"

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/core/attention/ragged_paged_attention.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate.h"
#include "csrc/ffi/thread_pool_executor.h"
#include "xla/ffi/api/ffi.h"

namespace pagemill {
namespace {

namespace ffi = xla::ffi;
using Vector = ffi::BufferR1<ffi::S32>;
using Matrix = ffi::BufferR2<ffi::S32>;

ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(status.code() == StatusCode::kInvalidArgument
                        ? ffi::ErrorCode::kInvalidArgument
                        : ffi::ErrorCode::kInternal,
                    status.message());
}

// The Python layer's spec is what users meet; this keeps a program that was
// built without it from reading out of bounds.
Status CheckShapes(const ffi::AnyBuffer& q, const ffi::AnyBuffer& kv_pages,
                   Vector kv_lens, Matrix page_indices, Vector cu_q_lens,
                   Vector num_seqs, const ffi::AnyBuffer& out) {
  const auto qs = q.dimensions(), kvs = kv_pages.dimensions();
  if (qs.size() != 3 || kvs.size() != 4) {
    return InvalidArgument(StrCat("q and kv_pages must have 3 and 4 "
                                  "dimensions, not ",
                                  qs.size(), " and ", kvs.size(), "."));
  }
  if (q.element_type() != kv_pages.element_type() ||
      q.element_type() != out.element_type() ||
      (q.element_type() != ffi::F32 && q.element_type() != ffi::BF16)) {
    return InvalidArgument(
        "q, kv_pages and out must all be float32 or all bfloat16.");
  }
  const int64_t kv_heads = kvs[2] / 2;
  if (kvs[2] % 2 != 0 || kv_heads == 0 || qs[1] % kv_heads != 0 ||
      qs[2] != kvs[3] || q.element_count() != out.element_count()) {
    return InvalidArgument(StrCat(
        "q of [", qs[0], ", ", qs[1], ", ", qs[2], "] does not fit kv_pages of [",
        kvs[0], ", ", kvs[1], ", ", kvs[2], ", ", kvs[3], "]."));
  }
  const int64_t rows = page_indices.dimensions()[0];
  if (static_cast<int64_t>(kv_lens.element_count()) != rows ||
      static_cast<int64_t>(cu_q_lens.element_count()) != rows + 1 ||
      num_seqs.element_count() != 1) {
    return InvalidArgument(
        StrCat("kv_lens, cu_q_lens and num_seqs must have ", rows, ", ",
               rows + 1, " and 1 entries for page_indices of ", rows,
               " rows."));
  }
  return Status();
}

ffi::Error RaggedPagedAttentionImpl(ffi::AnyBuffer q, ffi::AnyBuffer kv_pages,
                                    Vector kv_lens, Matrix page_indices,
                                    Vector cu_q_lens, Vector num_seqs,
                                    ffi::Result<ffi::AnyBuffer> out,
                                    ffi::ThreadPool thread_pool,
                                    float sm_scale, float soft_cap,
                                    int64_t sliding_window, bool causal) {
  const Status shapes = CheckShapes(q, kv_pages, kv_lens, page_indices,
                                    cu_q_lens, num_seqs, *out);
  if (!shapes.ok()) return ToError(shapes);
  const auto qs = q.dimensions(), kvs = kv_pages.dimensions();
  if (q.element_count() == 0) return ffi::Error::Success();
  const BatchView batch{.kv_lens = kv_lens.typed_data(),
                        .page_indices = page_indices.typed_data(),
                        .cu_q_lens = cu_q_lens.typed_data(),
                        .distribution = nullptr,
                        .num_seqs = num_seqs.typed_data()[0],
                        .max_num_seqs = page_indices.dimensions()[0],
                        .pages_per_seq = page_indices.dimensions()[1],
                        .page_size = kvs[1],
                        .total_num_pages = kvs[0],
                        .max_num_tokens = qs[0]};
  const std::vector<Violation> violations =
      Validate(batch, Level::kStructure);
  if (!violations.empty()) {
    return ToError(InvalidArgument(FormatViolations(violations)));
  }
  const RaggedPagedAttentionArgs args{
      .q = q.untyped_data(),
      .kv_pages = kv_pages.untyped_data(),
      .out = out->untyped_data(),
      .dtype = q.element_type() == ffi::F32 ? DType::kF32 : DType::kBF16,
      .batch = batch,
      .num_q_heads = qs[1],
      .num_kv_heads = kvs[2] / 2,
      .head_dim = qs[2],
      .sm_scale = sm_scale,
      .soft_cap = soft_cap,
      .sliding_window = sliding_window,
      .causal = causal};
  ThreadPoolExecutor executor(thread_pool);
  return ToError(RaggedPagedAttention(args, executor));
}

}  // namespace
}  // namespace pagemill

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagemillRaggedPagedAttention,
                              pagemill::RaggedPagedAttentionImpl,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()  // kv_pages
                                  .Arg<pagemill::Vector>()     // kv_lens
                                  .Arg<pagemill::Matrix>()     // page_indices
                                  .Arg<pagemill::Vector>()     // cu_q_lens
                                  .Arg<pagemill::Vector>()     // num_seqs
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<bool>("causal"));
