#include "csrc/ffi/handlers.h"

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/core/attention/ragged_paged_attention.h"
#include "csrc/core/batch_view.h"
#include "csrc/core/status.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate.h"
#include "csrc/ffi/buffers.h"
#include "csrc/ffi/thread_pool_executor.h"
#include "xla/ffi/api/ffi.h"

namespace pagemill {
namespace {

namespace ffi = xla::ffi;

struct Operands {
  ffi::AnyBuffer q;         // [T, Hq, D]
  ffi::AnyBuffer kv_pages;  // [N, page_size, 2 * Hkv, D]
  Metadata metadata;
  ffi::AnyBuffer out;  // as q
};

struct Options {
  float sm_scale;
  float soft_cap;          // 0: none
  int64_t sliding_window;  // 0: none
  bool causal;
};

Status CheckTensors(const Operands& o) {
  const Status ranks = FirstFailure({CheckRank("q", o.q, 3),
                                     CheckRank("kv_pages", o.kv_pages, 4),
                                     CheckRank("out", o.out, 3)});
  if (!ranks.ok()) return ranks;
  const ffi::DataType dtype = o.q.element_type();
  if (dtype != ffi::F32 && dtype != ffi::BF16) {
    return InvalidArgument(
        StrCat("q must be float32 or bfloat16, not ", DTypeText(dtype), "."));
  }
  const Status dtypes =
      FirstFailure({CheckDType("kv_pages", o.kv_pages, dtype, " as q is"),
                    CheckDType("out", o.out, dtype, " as q is")});
  if (!dtypes.ok()) return dtypes;
  const auto q = o.q.dimensions(), kv = o.kv_pages.dimensions();
  if (kv[2] == 0 || kv[2] % 2 != 0 || q[1] % (kv[2] / 2) != 0) {
    return InvalidArgument(StrCat(
        "kv_pages of ", ShapeText(o.kv_pages),
        " must hold 2 * num_kv_heads combined heads in its third dimension, "
        "where num_kv_heads divides the num_q_heads=",
        q[1], " of q."));
  }
  if (q[2] != kv[3]) {
    return InvalidArgument(StrCat("kv_pages of ", ShapeText(o.kv_pages),
                                  " must have the head_dim=", q[2],
                                  " of q in its last dimension."));
  }
  if (ShapeText(o.out) != ShapeText(o.q)) {
    return InvalidArgument(StrCat("out must have the shape of q, ",
                                  ShapeText(o.q), ", not ", ShapeText(o.out),
                                  "."));
  }
  return Status();
}

Status CheckOptions(const Options& options) {
  if (options.sliding_window < 0) {
    return InvalidArgument(StrCat("sliding_window=", options.sliding_window,
                                  " must be positive, or 0 for none."));
  }
  if (!(options.soft_cap >= 0)) {
    return InvalidArgument(StrCat("soft_cap=", std::to_string(options.soft_cap),
                                  " must be positive, or 0 for none."));
  }
  return Status();
}

BatchView MakeBatch(const Operands& o) {
  const Metadata& m = o.metadata;
  return {.kv_lens = m.kv_lens.typed_data<int32_t>(),
          .page_indices = m.page_indices.typed_data<int32_t>(),
          .cu_q_lens = m.cu_q_lens.typed_data<int32_t>(),
          .distribution = nullptr,
          .num_seqs = m.num_seqs.typed_data<int32_t>()[0],
          .max_num_seqs = m.page_indices.dimensions()[0],
          .pages_per_seq = m.page_indices.dimensions()[1],
          .page_size = o.kv_pages.dimensions()[1],
          .total_num_pages = o.kv_pages.dimensions()[0],
          .max_num_tokens = o.q.dimensions()[0]};
}

Status Attend(const Operands& o, const Options& options, Executor& executor) {
  const Status checks = FirstFailure(
      {CheckTensors(o), CheckMetadata(o.metadata), CheckOptions(options)});
  if (!checks.ok()) return checks;
  if (o.q.element_count() == 0) return Status();
  const BatchView batch = MakeBatch(o);
  const std::vector<Violation> violations = Validate(batch, Level::kStructure);
  if (!violations.empty()) {
    return InvalidArgument(FormatViolations(violations));
  }
  const auto q = o.q.dimensions();
  const RaggedPagedAttentionArgs args{
      .q = o.q.untyped_data(),
      .kv_pages = o.kv_pages.untyped_data(),
      .out = o.out.untyped_data(),
      .dtype = o.q.element_type() == ffi::F32 ? DType::kF32 : DType::kBF16,
      .batch = batch,
      .num_q_heads = q[1],
      .num_kv_heads = o.kv_pages.dimensions()[2] / 2,
      .head_dim = q[2],
      .sm_scale = options.sm_scale,
      .soft_cap = options.soft_cap,
      .sliding_window = options.sliding_window,
      .causal = options.causal};
  return RaggedPagedAttention(args, executor);
}

ffi::Error RaggedPagedAttentionHandler(
    ffi::AnyBuffer q, ffi::AnyBuffer kv_pages, ffi::AnyBuffer kv_lens,
    ffi::AnyBuffer page_indices, ffi::AnyBuffer cu_q_lens,
    ffi::AnyBuffer num_seqs, ffi::Result<ffi::AnyBuffer> out,
    ffi::ThreadPool thread_pool, float sm_scale, float soft_cap,
    int64_t sliding_window, bool causal) {
  ThreadPoolExecutor executor(thread_pool);
  return ToError(
      Attend({q, kv_pages, {kv_lens, page_indices, cu_q_lens, num_seqs}, *out},
             {sm_scale, soft_cap, sliding_window, causal}, executor));
}

}  // namespace
}  // namespace pagemill

XLA_FFI_DEFINE_HANDLER_SYMBOL(PagemillRaggedPagedAttention,
                              pagemill::RaggedPagedAttentionHandler,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()  // q
                                  .Arg<xla::ffi::AnyBuffer>()  // kv_pages
                                  .Arg<xla::ffi::AnyBuffer>()  // kv_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // page_indices
                                  .Arg<xla::ffi::AnyBuffer>()  // cu_q_lens
                                  .Arg<xla::ffi::AnyBuffer>()  // num_seqs
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<bool>("causal"));
