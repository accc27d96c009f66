#include "csrc/bindings/module.h"

NB_MODULE(_core, m) {
  m.doc() = "Pagemill's C++ core.";
  pagemill::bindings::BindValidate(m);
  pagemill::bindings::BindPagePool(m);
  pagemill::bindings::BindBlockPool(m);
  pagemill::bindings::BindPlanner(m);
  pagemill::bindings::BindLayouts(m);
  pagemill::bindings::BindFfi(m);
}
