// What the handlers share: checks of buffers' ranks, types and sizes, and a
// batch's metadata as it arrives from XLA.
//
// The Python layer's specs are what users meet; the checks here keep a program
// that was built without them from reading out of bounds.
#ifndef PAGEMILL_CSRC_FFI_BUFFERS_H_
#define PAGEMILL_CSRC_FFI_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "csrc/core/status.h"
#include "xla/ffi/api/ffi.h"

namespace pagemill {

xla::ffi::Error ToError(const Status& status);

// "[2, 3]".
std::string ShapeText(const xla::ffi::AnyBuffer& buffer);

// "float32".
std::string DTypeText(xla::ffi::DataType dtype);

Status CheckRank(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                 size_t rank);

// An operand that a call goes without is an array without elements.
inline bool IsAbsent(const xla::ffi::AnyBuffer& buffer) {
  return buffer.element_count() == 0;
}

// The reason follows the type: "float32 as q is".
Status CheckDType(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                  xla::ffi::DataType dtype, std::string_view reason);

// Of a vector.
Status CheckEntries(std::string_view name, const xla::ffi::AnyBuffer& buffer,
                    int64_t entries, std::string_view reason);

Status FirstFailure(std::initializer_list<Status> checks);

struct Metadata {
  xla::ffi::AnyBuffer kv_lens;       // i32[S]
  xla::ffi::AnyBuffer page_indices;  // i32[S, P]
  xla::ffi::AnyBuffer cu_q_lens;     // i32[S + 1]
  xla::ffi::AnyBuffer num_seqs;      // i32[1]
};

Status CheckMetadata(const Metadata& metadata);

}  // namespace pagemill

#endif  // PAGEMILL_CSRC_FFI_BUFFERS_H_
