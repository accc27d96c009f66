#include "csrc/bindings/status.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

namespace nb = nanobind;
using namespace nb::literals;  // NOLINT: "name"_a

namespace pagemill::bindings {
namespace {

[[noreturn]] void RaiseObject(const nb::object& exception) {
  PyErr_SetObject(exception.type().ptr(), exception.ptr());
  throw nb::python_error();
}

}  // namespace

void Raise(const Status& status) {
  // The classes are Python's: looked up when one is needed, since their module
  // imports nothing of this one.
  const auto errors = nb::module_::import_("pagemill.errors");
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
      RaiseObject(errors.attr("PagemillError")(status.message()));
    case StatusCode::kResourceExhausted:
      RaiseObject(errors.attr("CapacityError")(
          status.message(), "need"_a = status.shortage().need,
          "free"_a = status.shortage().free,
          "evictable"_a = status.shortage().evictable,
          "fenced"_a = status.shortage().fenced));
    case StatusCode::kUnavailable:
      RaiseObject(errors.attr("LeaseError")(status.message()));
    case StatusCode::kOk:
    case StatusCode::kInternal:
      break;
  }
  throw std::runtime_error(status.message());
}

}  // namespace pagemill::bindings
