// What the driver knows of kernels: their registrations, and how to run a grid of one.
#pragma once
#include <map>
#include <string>

#include "emulator.h"

namespace emulator {
struct Kernel {
    std::string name;
    void (*kernel)() = nullptr;
    Invoke invoke = nullptr;
    std::vector<Parameter> parameters;
    int max_threads = 1024;  // of __launch_bounds__
};
std::map<std::string, Kernel>& kernels();

// Runs all blocks to their end; aborts the process at a deadlock.
void run_grid(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes, void** arguments);
}  // namespace emulator
