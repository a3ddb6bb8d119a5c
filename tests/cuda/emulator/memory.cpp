// Memory of the devices and pinned host memory, copies and fills.
//
// An allocation is host memory between two pages that cannot be accessed, its end as near to the second
// as CUDA's alignment of 256 bytes lets it; it begins as 0xFF bytes (not a number in every float type).
// What was written between its end and that page shows when it is freed. Copies and fills of what is not
// inside one allocation fail; asynchronous copies touch host memory only when they run.
//
// Limits: unless pageable=staged is set, ordinary host memory is treated as pinned memory is; no managed
// or registered memory, no arrays, no copies between contexts other than by unified addresses.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

namespace emulator {
namespace {
constexpr size_t alignment = 256;
constexpr size_t pattern_bytes = size_t{16} << 20;  // a file of 0xFF bytes that large allocations map

using Table = std::map<uintptr_t, Allocation>;
Table device_memory, host_memory;

size_t page() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}
size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

int pattern_file() {
    static const int file = [] {
        int made = memfd_create("phalanx-emulated-cuda", MFD_CLOEXEC);
        if (made < 0 || ftruncate(made, pattern_bytes) != 0) return -1;
        void* bytes = mmap(nullptr, pattern_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, made, 0);
        if (bytes == MAP_FAILED) return -1;
        memset(bytes, 0xff, pattern_bytes);
        munmap(bytes, pattern_bytes);
        return made;
    }();
    return file;
}

// Fills with 0xFF; large memory by mapping the pattern, so that it costs nothing before it is written.
void fill(unsigned char* memory, size_t bytes) {
    size_t done = 0;
    if (bytes >= 4 * pattern_bytes && pattern_file() >= 0)
        for (; done < bytes; done += pattern_bytes)
            if (mmap(memory + done, std::min(pattern_bytes, bytes - done), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, pattern_file(), 0) == MAP_FAILED) {
                fprintf(stderr, "emulated CUDA: cannot map %zu bytes\n", bytes);
                abort();
            }
    if (done < bytes) memset(memory, 0xff, bytes);
}

// The address, or 0.
uintptr_t allocate(Table& table, size_t bytes, Context* context) {
    size_t body = round_up(bytes, std::max(page(), alignment));
    size_t mapped = body + 2 * page();
    void* mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return 0;
    auto* start = static_cast<unsigned char*>(mapping);
    if (mprotect(start + page(), body, PROT_READ | PROT_WRITE) != 0) {
        munmap(mapping, mapped);
        return 0;
    }
    fill(start + page(), body);
    auto address = reinterpret_cast<uintptr_t>(start) + page() + body - round_up(bytes, alignment);
    table[address] = Allocation{bytes, start, mapped, context};
    return address;
}

void check_margin(uintptr_t address, const unsigned char* from, const unsigned char* to) {
    for (; from < to; ++from)
        if (*from != 0xff) {
            fprintf(stderr, "emulated CUDA: the allocation at %p was written outside its bounds, at %p\n",
                    reinterpret_cast<void*>(address), static_cast<const void*>(from));
            abort();
        }
}

void release(Table& table, Table::iterator found) {
    const auto& [address, allocation] = *found;
    const auto* start = reinterpret_cast<const unsigned char*>(address);
    check_margin(address, allocation.mapping + page(), start);
    check_margin(address, start + allocation.bytes, allocation.mapping + allocation.mapped - page());
    munmap(allocation.mapping, allocation.mapped);
    if (allocation.context) allocation.context->used -= allocation.bytes;
    table.erase(found);
}

bool out_of_memory(Context* context, size_t bytes) {
    return bytes > settings().memory || context->used > settings().memory - bytes;
}

CUresult allocate_device(Context* context, CUdeviceptr* result, size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (out_of_memory(context, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    uintptr_t address = allocate(device_memory, bytes, context);
    if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
    context->used += bytes;
    *result = address;
    return CUDA_SUCCESS;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

bool is_pinned(const void* memory) {
    auto next = host_memory.upper_bound(reinterpret_cast<uintptr_t>(memory));
    if (next == host_memory.begin()) return false;
    const auto& [start, allocation] = *std::prev(next);
    return reinterpret_cast<uintptr_t>(memory) - start < allocation.bytes;
}

CUresult copy(Stream* stream, const char* name, void* to, const void* from, size_t bytes) {
    if (bytes == 0) return CUDA_SUCCESS;
    return enqueue(stream, name, [=] { memmove(to, from, bytes); });
}

// Of the calls without a stream those with host memory wait; the others are only ordered.
CUresult copy_and_wait(Context* context, const char* name, void* to, const void* from, size_t bytes) {
    log_call(name, static_cast<long long>(bytes));
    if (CUresult error = check_null_stream(context)) return error;
    if (CUresult error = check_unsafe_call()) return error;
    if (bytes == 0) return CUDA_SUCCESS;
    OperationRef done;
    if (CUresult error = enqueue(&context->null_stream, name, [=] { memmove(to, from, bytes); }, &done)) return error;
    run_until(done);
    return CUDA_SUCCESS;
}

template <class T>
CUresult set(Stream* stream, const char* name, CUdeviceptr to, T value, size_t count) {
    if (count > SIZE_MAX / sizeof(T)) return CUDA_ERROR_INVALID_VALUE;
    if (to % sizeof(T) != 0 || !is_device_range(to, count * sizeof(T))) return CUDA_ERROR_INVALID_VALUE;
    if (count == 0) return CUDA_SUCCESS;
    return enqueue(stream, name, [=] {
        T* values = static_cast<T*>(pointer(to));
        for (size_t i = 0; i < count; ++i) values[i] = value;
    });
}
}  // namespace

Allocation* device_allocation(CUdeviceptr address) {
    auto found = device_memory.find(static_cast<uintptr_t>(address));
    return found == device_memory.end() ? nullptr : &found->second;
}

void add_allocation(CUdeviceptr address, const Allocation& allocation) {
    device_memory[static_cast<uintptr_t>(address)] = allocation;
}

void drop_allocation(CUdeviceptr address) {
    auto found = device_memory.find(static_cast<uintptr_t>(address));
    munmap(found->second.mapping, found->second.mapped);
    device_memory.erase(found);
}

bool is_device_range(CUdeviceptr address, size_t bytes) {
    if (bytes == 0) return true;
    auto next = device_memory.upper_bound(static_cast<uintptr_t>(address));
    if (next == device_memory.begin()) return false;
    const auto& [start, allocation] = *std::prev(next);
    size_t offset = static_cast<uintptr_t>(address) - start;
    return offset < allocation.bytes && bytes <= allocation.bytes - offset;
}
}  // namespace emulator

using namespace emulator;

#define NEED_RANGE(address, bytes) \
    if (!is_device_range(address, bytes)) return CUDA_ERROR_INVALID_VALUE

API int phalanx_emulator_device_range(CUdeviceptr address, size_t bytes) {
    CALL;
    return is_device_range(address, bytes);
}

// ---- allocation --------------------------------------------------------------------------------------
API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    CALL;
    NEED_CONTEXT;
    *total = settings().memory;
    *free_bytes = settings().memory - context->used;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr* result, size_t bytes) {
    CALL;
    NEED_CONTEXT;
    log_call("cuMemAlloc_v2", static_cast<long long>(bytes));
    if (CUresult error = check_unsafe_call()) return error;
    return allocate_device(context, result, bytes);
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
    CALL;
    NEED_CONTEXT;
    if (address == 0) return CUDA_SUCCESS;
    auto found = device_memory.find(static_cast<uintptr_t>(address));
    log_call("cuMemFree_v2", found == device_memory.end() ? -1 : static_cast<long long>(found->second.bytes));
    if (found == device_memory.end()) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult error = check_unsafe_call()) return error;
    run_everything();
    found = device_memory.find(static_cast<uintptr_t>(address));  // an asynchronous free may have run
    if (found == device_memory.end() || !found->second.context) return CUDA_ERROR_INVALID_VALUE;
    check_unmapped(address);
    release(device_memory, found);
    (void)context;
    return CUDA_SUCCESS;
}

// The memory is there at once and goes when the stream reaches the free.
API CUresult cuMemAllocAsync(CUdeviceptr* result, size_t bytes, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    log_call("cuMemAllocAsync", static_cast<long long>(bytes));
    if (stream->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (out_of_memory(stream->context, bytes)) run_everything();
    return allocate_device(stream->context, result, bytes);
}

API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    auto found = device_memory.find(static_cast<uintptr_t>(address));
    log_call("cuMemFreeAsync", found == device_memory.end() ? -1 : static_cast<long long>(found->second.bytes));
    if (stream->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (found == device_memory.end()) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, "free", [address] {
        auto freed = device_memory.find(static_cast<uintptr_t>(address));
        if (freed != device_memory.end()) release(device_memory, freed);
    });
}

API CUresult cuMemHostAlloc(void** result, size_t bytes, unsigned flags) {
    CALL;
    NEED_CONTEXT;
    log_call("cuMemHostAlloc", static_cast<long long>(bytes));
    if (bytes == 0 || (flags & ~7u)) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult error = check_unsafe_call()) return error;
    uintptr_t address = allocate(host_memory, bytes, nullptr);
    if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
    *result = reinterpret_cast<void*>(address);
    (void)context;
    return CUDA_SUCCESS;
}

API CUresult cuMemFreeHost(void* memory) {
    CALL;
    NEED_CONTEXT;
    auto found = host_memory.find(reinterpret_cast<uintptr_t>(memory));
    log_call("cuMemFreeHost", found == host_memory.end() ? -1 : static_cast<long long>(found->second.bytes));
    if (found == host_memory.end()) return CUDA_ERROR_INVALID_VALUE;
    if (CUresult error = check_unsafe_call()) return error;
    run_everything();
    release(host_memory, found);
    (void)context;
    return CUDA_SUCCESS;
}

// ---- copies ------------------------------------------------------------------------------------------
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    NEED_RANGE(to, bytes);
    if (settings().staged && !stream->capture && !is_pinned(from)) {
        auto* start = static_cast<const char*>(from);
        auto staged = std::make_shared<std::vector<char>>(start, start + bytes);
        return enqueue(stream, "cuMemcpyHtoDAsync", [=] { memcpy(pointer(to), staged->data(), bytes); });
    }
    return copy(stream, "cuMemcpyHtoDAsync", pointer(to), from, bytes);
}

API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    NEED_RANGE(from, bytes);
    CUresult result = copy(stream, "cuMemcpyDtoHAsync", to, pointer(from), bytes);
    if (settings().staged && !stream->capture && !is_pinned(to)) run_until(stream->last);
    return result;
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    NEED_RANGE(to, bytes);
    NEED_RANGE(from, bytes);
    return copy(stream, "cuMemcpyDtoDAsync", pointer(to), pointer(from), bytes);
}

API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    CALL;
    NEED_CONTEXT;
    NEED_RANGE(to, bytes);
    return copy_and_wait(context, "cuMemcpyHtoD_v2", pointer(to), from, bytes);
}

API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    CALL;
    NEED_CONTEXT;
    NEED_RANGE(from, bytes);
    return copy_and_wait(context, "cuMemcpyDtoH_v2", to, pointer(from), bytes);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    CALL;
    NEED_CONTEXT;
    NEED_RANGE(to, bytes);
    NEED_RANGE(from, bytes);
    return copy(&context->null_stream, "cuMemcpyDtoD", pointer(to), pointer(from), bytes);
}

struct CUDA_MEMCPY2D {
    struct Side {
        size_t x, y;
        int type;
        void* host;
        CUdeviceptr device;
        void* array;
        size_t pitch;
    } from, to;
    size_t width, height;
};

API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* what, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    CUDA_MEMCPY2D plan = *what;
    if (plan.width == 0 || plan.height == 0) return CUDA_SUCCESS;
    char* start[2];
    for (int i = 0; i < 2; ++i) {
        CUDA_MEMCPY2D::Side& side = i ? plan.to : plan.from;
        if (side.pitch == 0) side.pitch = plan.width + side.x;
        if (side.pitch < plan.width + side.x) return CUDA_ERROR_INVALID_VALUE;
        size_t offset = side.y * side.pitch + side.x;
        if (side.type == 1) {
            start[i] = static_cast<char*>(side.host) + offset;
        } else if (side.type == 2 || side.type == 4) {
            NEED_RANGE(side.device + offset, (plan.height - 1) * side.pitch + plan.width);
            start[i] = static_cast<char*>(pointer(side.device)) + offset;
        } else {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    char *from = start[0], *to = start[1];
    return enqueue(stream, "cuMemcpy2DAsync", [=] {
        for (size_t row = 0; row < plan.height; ++row)
            memmove(to + row * plan.to.pitch, from + row * plan.from.pitch, plan.width);
    });
}

// ---- fills -------------------------------------------------------------------------------------------
#define FILL(name, type)                                                              \
    API CUresult name##Async(CUdeviceptr to, type value, size_t count, CUstream handle) { \
        CALL;                                                                         \
        NEED_STREAM(handle);                                                          \
        return set(stream, #name "Async", to, value, count);                          \
    }                                                                                 \
    API CUresult name##_v2(CUdeviceptr to, type value, size_t count) {                \
        CALL;                                                                         \
        NEED_CONTEXT;                                                                 \
        return set(&context->null_stream, #name, to, value, count);                   \
    }
FILL(cuMemsetD8, unsigned char)
FILL(cuMemsetD16, unsigned short)
FILL(cuMemsetD32, unsigned)
