// The one map from the core's statuses to Python's exceptions.
#ifndef PAGEMILL_CSRC_BINDINGS_STATUS_H_
#define PAGEMILL_CSRC_BINDINGS_STATUS_H_

#include <utility>

#include "csrc/core/status.h"

namespace pagemill::bindings {

// kInvalidArgument: pagemill.errors.PagemillError; kResourceExhausted:
// pagemill.errors.CapacityError; kUnavailable: pagemill.errors.LeaseError;
// kInternal: RuntimeError.  The GIL is held.
[[noreturn]] void Raise(const Status& status);

inline void RaiseIfError(const Status& status) {
  if (!status.ok()) Raise(status);
}

template <typename T>
T ValueOrRaise(Result<T> result) {
  RaiseIfError(result.status());
  return std::move(result).value();
}

}  // namespace pagemill::bindings

#endif  // PAGEMILL_CSRC_BINDINGS_STATUS_H_
