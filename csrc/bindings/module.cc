#include "csrc/bindings/module.h"

#include "csrc/bindings/host_batch.h"

NB_MODULE(_core, m) {
  m.doc() = "Pagemill's C++ core.";
  const auto batch = pagemill::bindings::BindValidate(m);
  pagemill::bindings::BindLayouts(batch);
  pagemill::bindings::BindPagePool(m);
  pagemill::bindings::BindBlockPool(m);
  pagemill::bindings::BindPlanner(m);
  pagemill::bindings::BindFfi(m);
}
