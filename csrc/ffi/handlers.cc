#include "csrc/ffi/handlers.h"

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/core/attention/ragged_paged_attention.h"
#include "csrc/core/batch_view.h"
#include "csrc/core/status.h"
#include "csrc/core/str_cat.h"
#include "csrc/core/validate.h"
#include "csrc/ffi/thread_pool_executor.h"
#include "xla/ffi/api/ffi.h"

namespace pagemill {
namespace {

namespace ffi = xla::ffi;

// The Python layer's spec is what users meet; the checks here keep a program
// that was built without it from reading out of bounds.
struct Operands {
  ffi::AnyBuffer q;             // [T, Hq, D]
  ffi::AnyBuffer kv_pages;      // [N, page_size, 2 * Hkv, D]
  ffi::AnyBuffer kv_lens;       // i32[S]
  ffi::AnyBuffer page_indices;  // i32[S, P]
  ffi::AnyBuffer cu_q_lens;     // i32[S + 1]
  ffi::AnyBuffer num_seqs;      // i32[1]
  ffi::AnyBuffer out;           // as q
};

struct Options {
  float sm_scale;
  float soft_cap;          // 0: none
  int64_t sliding_window;  // 0: none
  bool causal;
};

ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(status.code() == StatusCode::kInvalidArgument
                        ? ffi::ErrorCode::kInvalidArgument
                        : ffi::ErrorCode::kInternal,
                    status.message());
}

std::string ShapeText(const ffi::AnyBuffer& buffer) {
  std::string text = "[";
  for (const int64_t size : buffer.dimensions()) {
    text += StrCat(text.size() > 1 ? ", " : "", size);
  }
  return text + "]";
}

std::string DTypeText(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32:
      return "float32";
    case ffi::BF16:
      return "bfloat16";
    case ffi::S32:
      return "int32";
    case ffi::S64:
      return "int64";
    case ffi::F16:
      return "float16";
    case ffi::F64:
      return "float64";
    default:
      return StrCat("XLA's type ", static_cast<int>(dtype));
  }
}

Status CheckRank(std::string_view name, const ffi::AnyBuffer& buffer,
                 size_t rank) {
  if (buffer.dimensions().size() == rank) return Status();
  return InvalidArgument(StrCat(name, " must have ", rank,
                                rank == 1 ? " dimension" : " dimensions",
                                ", not the shape ", ShapeText(buffer), "."));
}

Status CheckDType(std::string_view name, const ffi::AnyBuffer& buffer,
                  ffi::DataType dtype, std::string_view reason) {
  if (buffer.element_type() == dtype) return Status();
  return InvalidArgument(StrCat(name, " must be ", DTypeText(dtype), reason,
                                ", not ", DTypeText(buffer.element_type()),
                                "."));
}

Status CheckEntries(std::string_view name, const ffi::AnyBuffer& buffer,
                    int64_t entries, std::string_view reason) {
  if (buffer.dimensions()[0] == entries) return Status();
  return InvalidArgument(StrCat(name, " must have ", entries, " entries, ",
                                reason, ", not ", buffer.dimensions()[0], "."));
}

Status FirstFailure(std::initializer_list<Status> checks) {
  for (const Status& check : checks) {
    if (!check.ok()) return check;
  }
  return Status();
}

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

Status CheckMetadata(const Operands& o) {
  const Status kinds =
      FirstFailure({CheckRank("kv_lens", o.kv_lens, 1),
                    CheckRank("page_indices", o.page_indices, 2),
                    CheckRank("cu_q_lens", o.cu_q_lens, 1),
                    CheckRank("num_seqs", o.num_seqs, 1),
                    CheckDType("kv_lens", o.kv_lens, ffi::S32, ""),
                    CheckDType("page_indices", o.page_indices, ffi::S32, ""),
                    CheckDType("cu_q_lens", o.cu_q_lens, ffi::S32, ""),
                    CheckDType("num_seqs", o.num_seqs, ffi::S32, "")});
  if (!kinds.ok()) return kinds;
  const int64_t rows = o.page_indices.dimensions()[0];
  return FirstFailure(
      {CheckEntries("kv_lens", o.kv_lens, rows, "one per row of page_indices"),
       CheckEntries("cu_q_lens", o.cu_q_lens, rows + 1,
                    "one more than page_indices has rows"),
       CheckEntries("num_seqs", o.num_seqs, 1, "the number of sequences")});
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
  return {.kv_lens = o.kv_lens.typed_data<int32_t>(),
          .page_indices = o.page_indices.typed_data<int32_t>(),
          .cu_q_lens = o.cu_q_lens.typed_data<int32_t>(),
          .distribution = nullptr,
          .num_seqs = o.num_seqs.typed_data<int32_t>()[0],
          .max_num_seqs = o.page_indices.dimensions()[0],
          .pages_per_seq = o.page_indices.dimensions()[1],
          .page_size = o.kv_pages.dimensions()[1],
          .total_num_pages = o.kv_pages.dimensions()[0],
          .max_num_tokens = o.q.dimensions()[0]};
}

Status Attend(const Operands& o, const Options& options, Executor& executor) {
  const Status checks =
      FirstFailure({CheckTensors(o), CheckMetadata(o), CheckOptions(options)});
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
      Attend({q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, *out},
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
