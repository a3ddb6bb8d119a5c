// The driver API's parts without time: start, errors, devices, contexts, modules and functions.
//
// Limits: a device has its primary context only, and releasing it keeps what was allocated; modules all hold
// the kernels that were compiled into this library (of an image that is text, those it names or makes by a
// macro that begins their names); there are no module globals.
#include <cctype>
#include <cstdio>
#include <cstring>

#include "internal.h"
#include "threads.h"

namespace emulator {
struct Function {
    const Kernel* kernel;
    int max_dynamic_shared = 48 * 1024;
};
struct Module {
    bool any_name = true;
    std::string text;
    std::map<std::string, Function*> functions;
};

namespace {
bool initialised = false;
thread_local Context* current = nullptr;
std::unordered_set<Module*> modules;
std::unordered_set<Function*> functions;
constexpr int shared_per_multiprocessor = 228 * 1024;

// The most shared memory that a block may ask for.
int shared_optin() {
    switch (settings().capability) {
        case 70: return 96 * 1024;
        case 75: return 64 * 1024;
        case 80: return 163 * 1024;
        case 86: case 89: case 120: case 121: return 99 * 1024;
        default: return 227 * 1024;
    }
}

// One context for each visible device, made at the first use and never destroyed.
std::vector<Context*>& contexts() {
    static auto* all = [] {
        auto* made = new std::vector<Context*>;
        for (int physical : settings().visible) {
            auto* context = new Context;
            context->ordinal = static_cast<int>(made->size());
            context->physical = physical;
            context->null_stream.context = context;
            made->push_back(context);
        }
        return made;
    }();
    return *all;
}

bool in_identifier(char c) { return isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Whether the text holds the word, or a macro that pastes words with its beginning (`begin_##name`).
bool names(const std::string& text, const std::string& word) {
    for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
        size_t end = at + word.size();
        if (at > 0 && in_identifier(text[at - 1])) continue;
        if (end == text.size() || !in_identifier(text[end])) return true;
    }
    for (size_t at = text.find("##"); at != std::string::npos; at = text.find("##", at + 2)) {
        size_t start = at;
        while (start > 0 && in_identifier(text[start - 1])) --start;
        if (start < at && word.compare(0, at - start, text, start, at - start) == 0) return true;
    }
    return false;
}

void fill_uuid(unsigned char* uuid, int physical) {
    memcpy(uuid, "Phalanx\0emulate", 16);
    uuid[15] = static_cast<unsigned char>(physical);
}

int attribute_of(const Context& context, int attribute) {
    switch (attribute) {
        case 1: case 2: case 3: return 1024;       // threads per block, block x, block y
        case 4: return 64;                         // block z
        case 5: return 0x7fffffff;                 // grid x
        case 6: case 7: return 65535;              // grid y, z
        case 8: return 48 * 1024;                  // shared memory per block
        case 9: return 64 * 1024;                  // constant memory
        case 10: return 32;                        // warp size
        case 11: return 0x7fffffff;                // pitch
        case 12: case 82: return 65536;            // registers per block, per multiprocessor
        case 13: return 1000000;                   // clock, kHz
        case 14: return 512;                       // texture alignment
        case 15: case 19: case 31: case 41: return 1;  // overlap, mapped, concurrent, unified
        case 16: return 4;                         // multiprocessors
        case 33: return context.physical + 1;      // PCI bus
        case 36: return 1000000;                   // memory clock, kHz
        case 37: return 1024;                      // bus width, bits
        case 38: return 4 << 20;                   // second-level cache
        case 39: return 2048;                      // threads per multiprocessor
        case 40: return 3;                         // asynchronous engines
        case 75: return settings().capability / 10;
        case 76: return settings().capability % 10;
        case 78: case 79: case 80: return 1;       // priorities, caches
        case 81: return shared_per_multiprocessor;
        case 90: case 96: return 0;                // preemption, multi-device launch
        case 97: return shared_optin();
        case 106: return 32;                       // blocks per multiprocessor
        case 111: return 1024;                     // reserved shared memory per block
        case 115: return settings().pools;
        default: return 0;
    }
}
}  // namespace

Context* context_of(CUdevice device) {
    if (device < 0 || device >= static_cast<int>(contexts().size())) return nullptr;
    return contexts()[device];
}
Context* current_context() { return current; }
}  // namespace emulator

using namespace emulator;

#define NEED_DEVICE                                       \
    CALL;                                                 \
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;  \
    Context* of_device = context_of(device);              \
    if (!of_device) return CUDA_ERROR_INVALID_DEVICE

API CUresult cuInit(unsigned flags) {
    CALL;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (settings().visible.empty()) return CUDA_ERROR_NO_DEVICE;
    if (!initialised) report_invalid_accesses();
    initialised = true;
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int* version) {
    CALL;
    *version = settings().driver;
    return CUDA_SUCCESS;
}

API CUresult cuGetErrorName(CUresult error, const char** text) {
    switch (error) {
#define X(name, value, description) case value: *text = #name; return CUDA_SUCCESS;
        CUDA_RESULTS(X)
#undef X
    }
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char** text) {
    switch (error) {
#define X(name, value, description) case value: *text = description; return CUDA_SUCCESS;
        CUDA_RESULTS(X)
#undef X
    }
    *text = nullptr;
    return CUDA_ERROR_INVALID_VALUE;
}

// ---- devices -----------------------------------------------------------------------------------------
API CUresult cuDeviceGetCount(int* count) {
    CALL;
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
    *count = static_cast<int>(contexts().size());
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice* handle, int device) {
    NEED_DEVICE;
    *handle = device;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    NEED_DEVICE;
    if (length < 1) return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, static_cast<size_t>(length), "Emulated CUDA device %d", of_device->physical);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    NEED_DEVICE;
    *value = attribute_of(*of_device, attribute);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice device) {
    NEED_DEVICE;
    *bytes = settings().memory;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(unsigned char* uuid, CUdevice device) {
    NEED_DEVICE;
    fill_uuid(uuid, of_device->physical);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(unsigned char* uuid, CUdevice device) {
    NEED_DEVICE;
    fill_uuid(uuid, of_device->physical);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
    NEED_DEVICE;
    if (length < 1) return CUDA_ERROR_INVALID_VALUE;
    snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", of_device->physical + 1);
    return CUDA_SUCCESS;
}

// ---- contexts ----------------------------------------------------------------------------------------
API CUresult cuDevicePrimaryCtxRetain(CUcontext* handle, CUdevice device) {
    NEED_DEVICE;
    ++of_device->references;
    *handle = of_device;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    NEED_DEVICE;
    if (of_device->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (--of_device->references == 0) run_everything();
    return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

API CUresult cuCtxSetCurrent(CUcontext handle) {
    CALL;
    if (handle && handle->references == 0) return CUDA_ERROR_INVALID_CONTEXT;
    current = handle;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext* handle) {
    CALL;
    if (!initialised) return CUDA_ERROR_NOT_INITIALIZED;
    *handle = current;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
    CALL;
    NEED_CONTEXT;
    *device = context->ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetFlags(unsigned) {
    CALL;
    NEED_CONTEXT;
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    CALL;
    NEED_CONTEXT;
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

// ---- modules and functions -----------------------------------------------------------------------------
API CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
    CALL;
    NEED_CONTEXT;
    if (!image) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult error = check_unsafe_call()) return error;
    auto* module = new Module;
    // An ELF file or a fat binary is not looked into.
    unsigned char first = *static_cast<const unsigned char*>(image);
    bool binary = first < '\t' || first >= 0x7f;
    module->any_name = binary;
    if (!binary) module->text = static_cast<const char*>(image);
    modules.insert(module);
    *handle = module;
    (void)context;
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule* handle, const void* image, unsigned, int*, void**) {
    return cuModuleLoadData(handle, image);
}

API CUresult cuModuleUnload(CUmodule module) {
    CALL;
    if (!modules.erase(module)) return CUDA_ERROR_INVALID_HANDLE;
    for (const auto& [name, function] : module->functions) {
        functions.erase(function);
        delete function;
    }
    delete module;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction* handle, CUmodule module, const char* name) {
    CALL;
    if (!modules.count(module)) return CUDA_ERROR_INVALID_HANDLE;
    auto found = kernels().find(name);
    if (found == kernels().end()) return CUDA_ERROR_NOT_FOUND;
    if (!module->any_name && !names(module->text, name)) return CUDA_ERROR_NOT_FOUND;
    Function*& function = module->functions[name];
    if (!function) functions.insert(function = new Function{&found->second});
    *handle = function;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr*, size_t*, CUmodule, const char*) {
    CALL;
    return CUDA_ERROR_NOT_FOUND;
}

API CUresult cuFuncGetAttribute(int* value, int attribute, CUfunction function) {
    CALL;
    if (!functions.count(function)) return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
        case 0: *value = function->kernel->max_threads; break;
        case 4: *value = 32; break;                                // registers: a plausible number
        case 5: case 6: *value = settings().capability; break;     // PTX and binary version
        case 8: *value = function->max_dynamic_shared; break;
        default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
    CALL;
    if (!functions.count(function)) return CUDA_ERROR_INVALID_HANDLE;
    if (attribute == 8) {
        if (value < 0 || value > shared_optin()) return CUDA_ERROR_INVALID_VALUE;
        function->max_dynamic_shared = value;
    }
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetCacheConfig(CUfunction function, int) {
    CALL;
    return functions.count(function) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function,
                                                                  int threads, size_t shared, unsigned) {
    CALL;
    if (!functions.count(function)) return CUDA_ERROR_INVALID_HANDLE;
    if (threads < 1) return CUDA_ERROR_INVALID_VALUE;
    *blocks = 0;
    if (threads > function->kernel->max_threads) return CUDA_SUCCESS;
    if (shared > static_cast<size_t>(function->max_dynamic_shared)) return CUDA_SUCCESS;
    int by_threads = 2048 / ((threads + 31) / 32 * 32);
    int by_shared = static_cast<int>(shared_per_multiprocessor / (shared + 1024));
    *blocks = std::min(32, std::min(by_threads, by_shared));
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads,
                                                         size_t shared) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            CUstream handle, void** parameters, void** extra) {
    CALL;
    NEED_STREAM(handle);
    if (!functions.count(function)) return CUDA_ERROR_INVALID_HANDLE;
    uint64_t threads = uint64_t{block_x} * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads) return CUDA_ERROR_INVALID_VALUE;
    if (grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535) return CUDA_ERROR_INVALID_VALUE;
    if (block_x > 1024 || block_y > 1024 || block_z > 64 || threads > 1024) return CUDA_ERROR_INVALID_VALUE;
    if (shared > static_cast<unsigned>(function->max_dynamic_shared)) return CUDA_ERROR_INVALID_VALUE;
    const Kernel& kernel = *function->kernel;
    if (threads > static_cast<uint64_t>(kernel.max_threads)) return CUDA_ERROR_INVALID_VALUE;
    if (extra || (!parameters && !kernel.parameters.empty())) return CUDA_ERROR_INVALID_VALUE;
    if (fails_at_peers(*context)) return CUDA_SUCCESS;
    // The parameters are copied now, each to an aligned place.
    size_t bytes = 0;
    std::vector<size_t> places;
    for (const Parameter& parameter : kernel.parameters) {
        bytes = (bytes + parameter.alignment - 1) / parameter.alignment * parameter.alignment;
        places.push_back(bytes);
        bytes += parameter.size;
    }
    struct alignas(64) Line { unsigned char bytes[64]; };
    auto copy = std::make_shared<std::vector<Line>>(bytes / 64 + 1);
    auto* base = reinterpret_cast<unsigned char*>(copy->data());
    for (size_t i = 0; i < places.size(); ++i) memcpy(base + places[i], parameters[i], kernel.parameters[i].size);
    dim3 grid(grid_x, grid_y, grid_z), block(block_x, block_y, block_z);
    const Kernel* target = &kernel;  // kernels are never removed, functions may be
    return enqueue(stream, "kernel " + kernel.name, [=] {
        std::vector<void*> arguments;
        for (size_t place : places)
            arguments.push_back(reinterpret_cast<unsigned char*>(copy->data()) + place);
        run_grid(*target, grid, block, shared, arguments.data());
    });
}
