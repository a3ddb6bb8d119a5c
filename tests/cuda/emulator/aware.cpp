// Preloaded, makes an MPI say that it takes the memory of devices: the emulator's is the host's, which any MPI takes.

extern "C" __attribute__((visibility("default"))) int MPIX_Query_cuda_support() {
    return 1;
}
