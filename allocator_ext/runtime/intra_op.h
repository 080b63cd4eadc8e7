#pragma once

namespace waterflow {

// Gives the calling thread, and no other, so many intra-op threads. Returns whether the libraries
// that PyTorch runs with can do that.
//
// PyTorch's own call sets a default for all later threads, too, and makes a pool of threads anew
// that is one for the process: milliseconds, and threads that spin for a while.
bool set_intra_op_threads(int count);

// Ends the intra-op threads that wait for the calling thread's next parallel kernel, which starts
// new ones. Returns whether the OpenMP that PyTorch runs with can do that.
//
// Each thread that has run such a kernel keeps a team of its own. As soon as there are more threads
// in all teams than cores, GNU's OpenMP has every one of them go to sleep after each kernel,
// instead of waiting for the next a moment longer: a step of small kernels then takes up to half as
// long again. So whoever is going to wait for others first lets go of its team.
bool release_intra_op_threads();

}  // namespace waterflow
