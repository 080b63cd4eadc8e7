// The extension module: the core (no torch) and everything that touches torch.
#include <torch/extension.h>

#include "account/guards.h"
#include "account/look.h"
#include "account/observer.h"
#include "account/schedule.h"
#include "bind/batches.h"
#include "bind/core.h"
#include "bind/throttle.h"
#include "bind/torch.h"
#ifdef WATERFLOW_WITH_CUDA
#include "cuda/cuda_lanes.h"
#endif

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "waterflow's allocator, storages, tapes and lanes";
  waterflow::bind_core(m);
  waterflow::bind_throttles(m);
  waterflow::bind_torch(m);
  waterflow::bind_batches(m);
  waterflow::bind_observer(m);
  waterflow::bind_guards(m);
  waterflow::bind_look(m);
  waterflow::bind_schedule(m);
#ifdef WATERFLOW_WITH_CUDA
  waterflow::bind_cuda(m);
  m.attr("cuda_built") = true;
#else
  m.attr("cuda_built") = false;
#endif
}
