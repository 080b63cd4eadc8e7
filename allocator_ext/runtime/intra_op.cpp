#include "runtime/intra_op.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <string>

namespace waterflow {
namespace {

using Pause = int (*)(int);
using SetCount = void (*)(int);
using SetLocalCount = int (*)(int);
constexpr int kSoft = 1;  // omp_pause_soft: settings stay

// A function as PyTorch's own library finds it: its wheels bring an OpenMP along, beside the
// system's. Null where there is none.
void* find(const char* name) {
  Dl_info torch;
  if (dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &torch) == 0) return nullptr;
  void* library = dlopen(torch.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* found = dlsym(library, name);
  dlclose(library);  // only this reference to it
  return found;
}

// Another maker's is left alone: Intel's puts the teams of all threads to sleep.
Pause find_pause() {
  void* pause = find("omp_pause_resource_all");
  Dl_info owner;
  if (pause == nullptr || dladdr(pause, &owner) == 0) return nullptr;
  const bool is_gnu = std::string(owner.dli_fname).find("gomp") != std::string::npos;
  return is_gnu ? reinterpret_cast<Pause>(pause) : nullptr;
}

}  // namespace

// MKL's names in lower case are Fortran's.
bool set_intra_op_threads(int count) {
  static const auto set_count = reinterpret_cast<SetCount>(find("omp_set_num_threads"));
  static const auto set_mkl = reinterpret_cast<SetLocalCount>(find("MKL_Set_Num_Threads_Local"));
  if (set_count == nullptr || (set_mkl == nullptr && at::hasMKL())) return false;
  at::get_num_threads();  // a thread takes the default over at its first look, not before
  set_count(count);
  if (set_mkl != nullptr) set_mkl(count);
  return at::get_num_threads() == count;
}

bool release_intra_op_threads() {
  if (at::get_num_threads() == 1) return true;  // it has none
  static const Pause pause = find_pause();
  return pause != nullptr && pause(kSoft) == 0;
}

}  // namespace waterflow
