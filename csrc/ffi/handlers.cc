#include "csrc/ffi/handlers.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "csrc/core/attention/kv_layout.h"
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
  ffi::AnyBuffer kv_pages;  // of a KvLayout
  Metadata metadata;
  // Without an entry where absent.
  ffi::AnyBuffer sinks;      // f32[Hq]
  ffi::AnyBuffer k_scale;    // f32[Hkv]
  ffi::AnyBuffer v_scale;    // f32[Hkv]
  ffi::AnyBuffer tree_mask;  // u32[T, words]
  ffi::AnyBuffer out;        // as q
  ffi::AnyBuffer lse;        // f32[T, Hq]; without an entry where not wanted
};

struct Options {
  int64_t num_kv_heads;
  int64_t kv_layout;
  float sm_scale;
  float soft_cap;          // 0: none
  int64_t sliding_window;  // 0: none
  bool causal;
};

// kv_pages as stored: of kInterleaved and kPacked the rows of a token, of
// kPlanes the heads.
struct KvShape {
  int64_t pages;
  int64_t page_size;
  int64_t rows;
  int64_t head_dim;
};

KvShape ShapeOf(const ffi::AnyBuffer& kv_pages, KvLayout layout) {
  const auto d = kv_pages.dimensions();
  switch (layout) {
    case KvLayout::kInterleaved:
      return {d[0], d[1], d[2], d[3]};
    case KvLayout::kPacked:
      return {d[0], d[1], d[2] * d[3], d[4]};
    case KvLayout::kPlanes:
      return {d[0], d[3], d[2], d[4]};
  }
  return {};
}

KvStrides StridesOf(const KvShape& kv, KvLayout layout) {
  return layout == KvLayout::kPlanes
             ? PlanesStrides(kv.page_size, kv.rows, kv.head_dim)
             : InterleavedStrides(kv.page_size, kv.rows, kv.head_dim);
}

std::optional<DType> KvDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32:
      return DType::kF32;
    case ffi::BF16:
      return DType::kBF16;
    case ffi::F8E4M3FN:
      return DType::kF8E4M3;
    case ffi::F8E5M2:
      return DType::kF8E5M2;
    case ffi::S8:
      return DType::kI8;
    default:
      return std::nullopt;
  }
}

Status CheckDTypes(const Operands& o) {
  const ffi::DataType dtype = o.q.element_type();
  if (dtype != ffi::F32 && dtype != ffi::BF16) {
    return InvalidArgument(
        StrCat("q must be float32 or bfloat16, not ", DTypeText(dtype), "."));
  }
  const ffi::DataType kv = o.kv_pages.element_type();
  if (!KvDType(kv) || ((kv == ffi::F32 || kv == ffi::BF16) && kv != dtype)) {
    return InvalidArgument(
        StrCat("kv_pages must be ", DTypeText(dtype),
               " as q is, or float8_e4m3fn, float8_e5m2 or int8, not ",
               DTypeText(kv), "."));
  }
  return FirstFailure({CheckDType("out", o.out, dtype, " as q is"),
                       CheckDType("sinks", o.sinks, ffi::F32, ""),
                       CheckDType("k_scale", o.k_scale, ffi::F32, ""),
                       CheckDType("v_scale", o.v_scale, ffi::F32, ""),
                       CheckDType("tree_mask", o.tree_mask, ffi::U32, ""),
                       CheckDType("lse", o.lse, ffi::F32, "")});
}

Status CheckKvPages(const Operands& o, const Options& options) {
  const auto layout = static_cast<KvLayout>(options.kv_layout);
  const Status rank = CheckRank("kv_pages", o.kv_pages,
                                layout == KvLayout::kInterleaved ? 4 : 5);
  if (!rank.ok()) return rank;
  const KvShape kv = ShapeOf(o.kv_pages, layout);
  const auto q = o.q.dimensions();
  const int64_t heads = options.num_kv_heads;
  const bool planes = layout == KvLayout::kPlanes;
  if (heads < 1 || q[1] % heads != 0 ||
      (planes ? kv.rows != heads || o.kv_pages.dimensions()[1] != 2
              : kv.rows < 2 * heads)) {
    return InvalidArgument(StrCat(
        "kv_pages of ", ShapeText(o.kv_pages), " must hold K and V of ", heads,
        " num_kv_heads, which divides the num_q_heads=", q[1], " of q."));
  }
  if (kv.head_dim < q[2]) {
    return InvalidArgument(StrCat("kv_pages of ", ShapeText(o.kv_pages),
                                  " must have the head_dim=", q[2],
                                  " of q in its last dimension."));
  }
  return Status();
}

Status CheckExtras(const Operands& o, const Options& options) {
  const auto q = o.q.dimensions();
  const auto entries = [](const char* name, const ffi::AnyBuffer& buffer,
                          int64_t expected, const char* reason) {
    if (IsAbsent(buffer)) return Status();
    const Status rank = CheckRank(name, buffer, 1);
    return rank.ok() ? CheckEntries(name, buffer, expected, reason) : rank;
  };
  if (!IsAbsent(o.tree_mask)) {
    const Status rank = CheckRank("tree_mask", o.tree_mask, 2);
    if (!rank.ok()) return rank;
    if (o.tree_mask.dimensions()[0] != q[0]) {
      return InvalidArgument(StrCat("tree_mask of ", ShapeText(o.tree_mask),
                                    " must have the ", q[0], " rows of q."));
    }
  }
  if (!IsAbsent(o.lse) &&
      (o.lse.dimensions().size() != 2 || o.lse.dimensions()[0] != q[0] ||
       o.lse.dimensions()[1] != q[1])) {
    return InvalidArgument(StrCat("lse of ", ShapeText(o.lse), " must be [",
                                  q[0], ", ", q[1], "]."));
  }
  return FirstFailure(
      {entries("sinks", o.sinks, q[1], "num_q_heads"),
       entries("k_scale", o.k_scale, options.num_kv_heads, "num_kv_heads"),
       entries("v_scale", o.v_scale, options.num_kv_heads, "num_kv_heads")});
}

Status CheckTensors(const Operands& o, const Options& options) {
  const Status ranks =
      FirstFailure({CheckRank("q", o.q, 3), CheckRank("out", o.out, 3)});
  if (!ranks.ok()) return ranks;
  const Status checks = FirstFailure(
      {CheckDTypes(o), CheckKvPages(o, options), CheckExtras(o, options)});
  if (!checks.ok()) return checks;
  if (ShapeText(o.out) != ShapeText(o.q)) {
    return InvalidArgument(StrCat("out must have the shape of q, ",
                                  ShapeText(o.q), ", not ", ShapeText(o.out),
                                  "."));
  }
  return Status();
}

Status CheckOptions(const Options& options) {
  if (options.kv_layout < 0 ||
      options.kv_layout > static_cast<int64_t>(KvLayout::kPlanes)) {
    return InvalidArgument(
        StrCat("kv_layout=", options.kv_layout, " must name a KvLayout."));
  }
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

BatchView MakeBatch(const Operands& o, const KvShape& kv) {
  const Metadata& m = o.metadata;
  return {.kv_lens = m.kv_lens.typed_data<int32_t>(),
          .page_indices = m.page_indices.typed_data<int32_t>(),
          .cu_q_lens = m.cu_q_lens.typed_data<int32_t>(),
          .distribution = nullptr,
          .num_seqs = m.num_seqs.typed_data<int32_t>()[0],
          .max_num_seqs = m.page_indices.dimensions()[0],
          .pages_per_seq = m.page_indices.dimensions()[1],
          .page_size = kv.page_size,
          .total_num_pages = kv.pages,
          .max_num_tokens = o.q.dimensions()[0]};
}

template <typename T>
T* DataOrNull(const ffi::AnyBuffer& buffer) {
  return IsAbsent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

RaggedPagedAttentionArgs MakeArgs(const Operands& o, const Options& options,
                                  const KvShape& kv, const BatchView& batch) {
  const auto q = o.q.dimensions();
  const bool tree = !IsAbsent(o.tree_mask);
  return {.q = o.q.untyped_data(),
          .kv_pages = o.kv_pages.untyped_data(),
          .out = o.out.untyped_data(),
          .lse = DataOrNull<float>(o.lse),
          .dtype = *KvDType(o.q.element_type()),
          .kv_dtype = *KvDType(o.kv_pages.element_type()),
          .kv = StridesOf(kv, static_cast<KvLayout>(options.kv_layout)),
          .batch = batch,
          .num_q_heads = q[1],
          .num_kv_heads = options.num_kv_heads,
          .head_dim = q[2],
          .sm_scale = options.sm_scale,
          .soft_cap = options.soft_cap,
          .sliding_window = options.sliding_window,
          .causal = options.causal,
          .sinks = DataOrNull<float>(o.sinks),
          .k_scale = DataOrNull<float>(o.k_scale),
          .v_scale = DataOrNull<float>(o.v_scale),
          .tree_mask = DataOrNull<uint32_t>(o.tree_mask),
          .tree_words = tree ? o.tree_mask.dimensions()[1] : 0};
}

Status Attend(const Operands& o, const Options& options, Executor& executor) {
  const Status options_hold = CheckOptions(options);
  if (!options_hold.ok()) return options_hold;
  const Status checks =
      FirstFailure({CheckTensors(o, options), CheckMetadata(o.metadata)});
  if (!checks.ok()) return checks;
  if (o.q.element_count() == 0) return Status();
  const KvShape kv =
      ShapeOf(o.kv_pages, static_cast<KvLayout>(options.kv_layout));
  const BatchView batch = MakeBatch(o, kv);
  const std::vector<Violation> violations = Validate(batch, Level::kStructure);
  if (!violations.empty()) {
    return InvalidArgument(FormatViolations(violations));
  }
  return RaggedPagedAttention(MakeArgs(o, options, kv, batch), executor);
}

ffi::Error RaggedPagedAttentionHandler(
    ffi::AnyBuffer q, ffi::AnyBuffer kv_pages, ffi::AnyBuffer kv_lens,
    ffi::AnyBuffer page_indices, ffi::AnyBuffer cu_q_lens,
    ffi::AnyBuffer num_seqs, ffi::AnyBuffer sinks, ffi::AnyBuffer k_scale,
    ffi::AnyBuffer v_scale, ffi::AnyBuffer tree_mask,
    ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
    ffi::ThreadPool thread_pool, int64_t num_kv_heads, int64_t kv_layout,
    float sm_scale, float soft_cap, int64_t sliding_window, bool causal) {
  ThreadPoolExecutor executor(thread_pool);
  const Operands operands = {
      q,         kv_pages, {kv_lens, page_indices, cu_q_lens, num_seqs},
      sinks,     k_scale,  v_scale,
      tree_mask, *out,     *lse};
  return ToError(Attend(
      operands,
      {num_kv_heads, kv_layout, sm_scale, soft_cap, sliding_window, causal},
      executor));
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
                                  .Arg<xla::ffi::AnyBuffer>()  // sinks
                                  .Arg<xla::ffi::AnyBuffer>()  // k_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // v_scale
                                  .Arg<xla::ffi::AnyBuffer>()  // tree_mask
                                  .Ret<xla::ffi::AnyBuffer>()  // out
                                  .Ret<xla::ffi::AnyBuffer>()  // lse
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Attr<int64_t>("num_kv_heads")
                                  .Attr<int64_t>("kv_layout")
                                  .Attr<float>("sm_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("sliding_window")
                                  .Attr<bool>("causal"));
