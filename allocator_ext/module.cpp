// The extension module: the core (no torch) and everything that touches torch.
#include <torch/extension.h>

#include "bind_core.h"
#include "bind_torch.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "waterflow's allocator, storages, tapes and lanes";
  waterflow::bind_core(m);
  waterflow::bind_torch(m);
}
