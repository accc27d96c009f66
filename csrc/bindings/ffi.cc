#include <nanobind/nanobind.h>

#include "csrc/bindings/module.h"
#include "csrc/ffi/checked.h"
#include "csrc/ffi/handlers.h"

namespace nb = nanobind;

namespace pagemill::bindings {

void BindFfi(nb::module_& m) {
  m.def(
      "registrations",
      [] {
        nb::dict handlers;
        handlers["pagemill_ragged_paged_attention"] =
            nb::capsule(reinterpret_cast<void*>(PagemillRaggedPagedAttention));
        handlers["pagemill_checked"] =
            nb::capsule(reinterpret_cast<void*>(PagemillChecked));
        return handlers;
      },
      nb::sig("def registrations() -> dict[str, object]"),
      "XLA FFI handlers by target name.");
}

}  // namespace pagemill::bindings
