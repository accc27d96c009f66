// What each file of the module pagemill._core adds to it.
#ifndef PAGEMILL_CSRC_BINDINGS_MODULE_H_
#define PAGEMILL_CSRC_BINDINGS_MODULE_H_

#include <nanobind/nanobind.h>

namespace pagemill::bindings {

struct HostBatch;

// The class of batches on the host, which others add to.
nanobind::class_<HostBatch> BindValidate(nanobind::module_& m);
void BindPagePool(nanobind::module_& m);
void BindBlockPool(nanobind::module_& m);
void BindPlanner(nanobind::module_& m);
void BindLayouts(nanobind::class_<HostBatch> batch);
void BindFfi(nanobind::module_& m);

}  // namespace pagemill::bindings

#endif  // PAGEMILL_CSRC_BINDINGS_MODULE_H_
