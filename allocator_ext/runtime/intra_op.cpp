#include "runtime/intra_op.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <string>

namespace waterflow {
namespace {

using Pause = int (*)(int);
constexpr int kSoft = 1;  // omp_pause_soft: settings stay

// Of the library that PyTorch itself uses: its wheels bring one along, beside the system's. Another
// maker's is left alone: Intel's puts the teams of all threads to sleep.
Pause find_pause() {
  Dl_info torch;
  if (dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &torch) == 0) return nullptr;
  void* library = dlopen(torch.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* pause = dlsym(library, "omp_pause_resource_all");
  dlclose(library);  // only this reference to it
  Dl_info owner;
  if (pause == nullptr || dladdr(pause, &owner) == 0) return nullptr;
  const bool is_gnu = std::string(owner.dli_fname).find("gomp") != std::string::npos;
  return is_gnu ? reinterpret_cast<Pause>(pause) : nullptr;
}

}  // namespace

bool release_intra_op_threads() {
  static const Pause pause = find_pause();
  return pause != nullptr && pause(kSoft) == 0;
}

}  // namespace waterflow
