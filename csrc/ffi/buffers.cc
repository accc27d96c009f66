#include "csrc/ffi/buffers.h"

#include "csrc/core/str_cat.h"

namespace pagemill {

namespace ffi = xla::ffi;

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
    case ffi::U32:
      return "uint32";
    case ffi::S8:
      return "int8";
    case ffi::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::F8E5M2:
      return "float8_e5m2";
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

Status CheckMetadata(const Metadata& m) {
  const Status kinds =
      FirstFailure({CheckRank("kv_lens", m.kv_lens, 1),
                    CheckRank("page_indices", m.page_indices, 2),
                    CheckRank("cu_q_lens", m.cu_q_lens, 1),
                    CheckRank("num_seqs", m.num_seqs, 1),
                    CheckDType("kv_lens", m.kv_lens, ffi::S32, ""),
                    CheckDType("page_indices", m.page_indices, ffi::S32, ""),
                    CheckDType("cu_q_lens", m.cu_q_lens, ffi::S32, ""),
                    CheckDType("num_seqs", m.num_seqs, ffi::S32, "")});
  if (!kinds.ok()) return kinds;
  const int64_t rows = m.page_indices.dimensions()[0];
  return FirstFailure(
      {CheckEntries("kv_lens", m.kv_lens, rows, "one per row of page_indices"),
       CheckEntries("cu_q_lens", m.cu_q_lens, rows + 1,
                    "one more than page_indices has rows"),
       CheckEntries("num_seqs", m.num_seqs, 1, "the number of sequences")});
}

}  // namespace pagemill
