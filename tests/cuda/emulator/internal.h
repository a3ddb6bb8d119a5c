// What the driver's files share: settings, the lock and the log, devices, streams and their operations,
// captures. Everything is guarded by one lock that each API function holds while it runs.
#pragma once
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "abi.h"

namespace emulator {
// ---- settings.cpp ------------------------------------------------------------------------------------
struct Settings {
    std::vector<int> visible;  // the physical numbers of the devices, in order
    size_t memory = size_t{64} << 30;
    int driver = 13000;
    int capability = 90;
    bool pools = true;   // whether the device reports memory pools
    bool ipc = true;     // whether memory has handles for other processes
    bool keeps_peer_writes = true;  // whether they find there what a process writes that has mapped it
    bool reaches_peers = true;  // whether a kernel works that may use what is mapped
    int products = 1;    // the algorithms of each matrix product
    bool eager = false;  // run each operation at once
    bool staged = false;  // asynchronous copies with ordinary host memory are done with it at return
};
const Settings& settings();

struct Counter {
    const char* name;
    long calls = 0;
};
Counter* counter(const char* name);

// Held by every API function: the lock, and one more call of the function.
class Call {
    std::lock_guard<std::recursive_mutex> guard;

   public:
    explicit Call(const char* name, Counter*& where);
};
#define CALL                                       \
    static emulator::Counter* calls_here = nullptr; \
    emulator::Call call_here(__func__, calls_here)

// One line in PHALANX_EMULATED_CUDA_LOG, if there is one; `bytes` < 0: none.
void log_call(const char* name, long long bytes = -1);

// What runs now, for the message at an invalid memory access.
extern std::string running_operation;
void report_invalid_accesses();

// ---- streams.cpp -------------------------------------------------------------------------------------
struct Operation;
using OperationRef = std::shared_ptr<Operation>;
using Work = std::function<void()>;  // may run more than once: a graph replays it

struct Operation {
    std::string name;
    Work work;
    Stream* stream = nullptr;
    std::vector<OperationRef> after;  // of other streams
    bool done = false;
    bool queried = false;  // a query has already answered "not ready"
    std::chrono::steady_clock::time_point finished;
};

struct Capture;
struct Stream {
    Context* context = nullptr;
    bool blocking = true;  // synchronises with the null stream
    int priority = 0;
    bool destroyed = false;
    std::deque<OperationRef> queue;   // what has not run
    OperationRef last;                // the latest operation, run or not
    std::shared_ptr<Capture> capture;  // while the stream is part of one
    std::vector<int> frontier;         // in a capture: the nodes that the next one comes after
    std::vector<OperationRef> waits;   // events that the next operation comes after
};

struct Event {
    bool timing = true;
    OperationRef recorded;
    std::shared_ptr<Capture> capture;  // if last recorded in a capturing stream
    std::vector<int> nodes;
};

struct Context {
    int ordinal = 0;
    int physical = 0;
    int references = 0;
    size_t used = 0;
    bool has_fault = false;  // a kernel has failed: the context does no more work
    Stream null_stream;
    std::list<std::unique_ptr<Stream>> streams;
};
Context* context_of(CUdevice device);  // null if there is none
Context* current_context();            // null if none is set

// The stream of a handle (null: the legacy stream of the current context), or null if there is none.
Stream* stream_of(CUstream handle);
CUresult enqueue(Stream* stream, std::string name, Work work, OperationRef* operation = nullptr);
void run_until(const OperationRef& operation);
void run_everything();

// ---- graphs.cpp --------------------------------------------------------------------------------------
struct Node {
    std::string name;
    Work work;
    std::vector<int> after;
};
struct Graph {
    std::vector<Node> nodes;
};
struct Capture {
    Stream* origin = nullptr;
    CaptureMode mode = CAPTURE_GLOBAL;
    std::thread::id thread;
    bool active = true;
    bool invalid = false;
    std::vector<Stream*> streams;
    std::unique_ptr<Graph> graph;
};
CUresult capture_operation(Stream* stream, std::string name, Work work);
CUresult capture_wait(Stream* stream, Event* event);
void abandon_capture(Stream* stream);  // for a stream that is destroyed while it is captured
// Whether a call that a capture may forbid is allowed now; if not, the capture is invalidated.
CUresult check_unsafe_call();
CUresult check_null_stream(Context* context);
// For calls that would wait for a stream that is captured: always an error.
CUresult forbid_in_capture(Capture& capture, CUresult error);
bool any_capture(Context* context, CUresult* error);

// ---- memory.cpp --------------------------------------------------------------------------------------
struct Allocation {
    size_t bytes = 0;
    unsigned char* mapping = nullptr;  // with a page before and after that cannot be accessed
    size_t mapped = 0;
    Context* context = nullptr;  // null: the host's, or that of another process
};
Allocation* device_allocation(CUdeviceptr address);  // null if none begins there
void add_allocation(CUdeviceptr address, const Allocation& allocation);
void drop_allocation(CUdeviceptr address);
// Whether the bytes lie inside one allocation of a device.
bool is_device_range(CUdeviceptr address, size_t bytes);

// ---- ipc.cpp -----------------------------------------------------------------------------------------
// Ends the process if another one has the memory at `address` mapped, which is about to be freed.
void check_unmapped(CUdeviceptr address);
// Whether a kernel fails because memory of another process is mapped: later calls have the error.
bool fails_at_peers(Context& context);

#define NEED_CONTEXT                                        \
    emulator::Context* context = emulator::current_context(); \
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;        \
    if (context->references == 0) return CUDA_ERROR_CONTEXT_IS_DESTROYED; \
    if (context->has_fault) return CUDA_ERROR_ILLEGAL_ADDRESS
#define NEED_STREAM(handle)                                   \
    NEED_CONTEXT;                                             \
    emulator::Stream* stream = emulator::stream_of(handle); \
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;            \
    (void)context
}  // namespace emulator

// ---- what libcublasLt uses of libcuda ------------------------------------------------------------------
API CUresult phalanx_emulator_enqueue(CUstream stream, const char* name,
                                      const std::function<void()>* work);
API void phalanx_emulator_count(const char* name);
API int phalanx_emulator_num_products();
API int phalanx_emulator_device_range(CUdeviceptr address, size_t bytes);
