// Device memory that processes share: cuIpcGetMemHandle and what belongs to it.
//
// An allocation whose handle is asked for moves to a file in memory, at the same address, and other processes
// map that file. Its first page counts the processes that have it mapped: freeing it while there are any,
// which CUDA leaves undefined, ends the process. A handle of freed memory is refused, and so is one of the
// process itself.
//
// Limits: no handles of events; every device may use the memory of every other.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

namespace emulator {
namespace {
constexpr unsigned long long magic = 0x7068616c616e78ull;

struct Handle {
    unsigned long long magic;
    int process, file;
    ino_t inode;
    size_t body, offset, bytes;
};
static_assert(sizeof(Handle) <= 64, "a handle has 64 bytes");

struct Shared {
    int file;
    std::atomic<int>* num_mapped;
};
std::map<uintptr_t, Shared> exported, imported;

size_t page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

std::atomic<int>* map_counter(int file) {
    void* first = mmap(nullptr, page(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    return first == MAP_FAILED ? nullptr : static_cast<std::atomic<int>*>(first);
}

bool map_body(int file, unsigned char* into, size_t body, int kind = MAP_SHARED) {
    return mmap(into, body, PROT_READ | PROT_WRITE, kind | MAP_FIXED, file,
                static_cast<off_t>(page())) != MAP_FAILED;
}

// Moves the memory between the pages around an allocation to a file; -1 if there is none to be had.
int move_to_file(unsigned char* start, size_t body) {
    int file = memfd_create("phalanx-emulated-cuda-ipc", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(page() + body)) != 0) return -1;
    for (size_t done = 0; done < body;) {
        ssize_t written = pwrite(file, start + done, body - done, static_cast<off_t>(page() + done));
        if (written <= 0) return -1;
        done += static_cast<size_t>(written);
    }
    return map_body(file, start, body) ? file : -1;
}
}  // namespace

void check_unmapped(CUdeviceptr address) {
    auto found = exported.find(address);
    if (found == exported.end()) return;
    if (found->second.num_mapped->load() > 0) {
        fprintf(stderr, "emulated CUDA: memory was freed that another process has mapped\n");
        abort();
    }
    munmap(found->second.num_mapped, page());
    close(found->second.file);
    exported.erase(found);
}
bool fails_at_peers(Context& context) {
    context.has_fault = !settings().reaches_peers && !imported.empty();
    return context.has_fault;
}
}  // namespace emulator

using namespace emulator;

API CUresult cuIpcGetMemHandle(Handle* result, CUdeviceptr address) {
    CALL;
    NEED_CONTEXT;
    (void)context;
    if (!settings().ipc) return CUDA_ERROR_NOT_SUPPORTED;
    Allocation* allocation = device_allocation(address);
    if (!allocation || imported.count(address)) return CUDA_ERROR_INVALID_VALUE;
    unsigned char* start = allocation->mapping + page();
    size_t body = allocation->mapped - 2 * page();
    auto known = exported.find(address);
    if (known == exported.end()) {
        run_everything();
        int file = move_to_file(start, body);
        std::atomic<int>* counter = file < 0 ? nullptr : map_counter(file);
        if (!counter) return CUDA_ERROR_OUT_OF_MEMORY;
        known = exported.emplace(address, Shared{file, counter}).first;
    }
    struct stat about;
    if (fstat(known->second.file, &about) != 0) return CUDA_ERROR_UNKNOWN;
    memset(static_cast<void*>(result), 0, 64);
    size_t offset = address - reinterpret_cast<uintptr_t>(start);
    *result = Handle{magic, getpid(), known->second.file, about.st_ino, body, offset, allocation->bytes};
    return CUDA_SUCCESS;
}

// CUDA passes the handle, a structure of 64 bytes, by value.
struct HandleBytes {
    char bytes[64];
};

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* result, HandleBytes passed, unsigned flags) {
    CALL;
    NEED_CONTEXT;
    Handle handle;
    memcpy(&handle, passed.bytes, sizeof handle);
    if (flags > 1 || handle.magic != magic) return CUDA_ERROR_INVALID_VALUE;
    if (handle.process == getpid()) return CUDA_ERROR_INVALID_CONTEXT;
    std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
    int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0 || about.st_ino != handle.inode) return CUDA_ERROR_INVALID_VALUE;
    size_t mapped = handle.body + 2 * page();
    void* mapping = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    std::atomic<int>* counter = map_counter(file);
    if (mapping == MAP_FAILED || !counter) return CUDA_ERROR_OUT_OF_MEMORY;
    auto* start = static_cast<unsigned char*>(mapping);
    int kind = settings().keeps_peer_writes ? MAP_SHARED : MAP_PRIVATE;
    if (!map_body(file, start + page(), handle.body, kind)) return CUDA_ERROR_OUT_OF_MEMORY;
    counter->fetch_add(1);
    *result = reinterpret_cast<uintptr_t>(start) + page() + handle.offset;
    imported.emplace(*result, Shared{file, counter});
    add_allocation(*result, Allocation{handle.bytes, start, mapped, nullptr});
    (void)context;
    return CUDA_SUCCESS;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CALL;
    NEED_CONTEXT;
    (void)context;
    auto found = imported.find(address);
    if (found == imported.end()) return CUDA_ERROR_INVALID_VALUE;
    run_everything();
    found->second.num_mapped->fetch_sub(1);
    munmap(found->second.num_mapped, page());
    close(found->second.file);
    imported.erase(found);
    drop_allocation(address);
    return CUDA_SUCCESS;
}
