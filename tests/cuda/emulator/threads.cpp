// Runs the grid of a kernel: the blocks one after the other, the threads of a block as fibers.
//
// Threads start one after the other on the same fiber, so one that never waits costs a function call.
// A thread that reaches a barrier or a shuffle keeps its fiber and the next thread starts on another.
// Blocks of odd number run their threads in descending order: shared memory that is read without the
// barrier it needs goes wrong in one order or the other. Each launch draws the order of its blocks: sums that
// depend on it have other bits when they are repeated.
//
// Limits: the barrier and the shuffles follow the programming guide for capability 7.0 and later
// (they wait for the threads that have not exited); a barrier reached at two places of the source is
// not told apart. A fiber has 256 KiB of stack. The switch between fibers needs GCC. The caller holds the
// emulator's lock: all is global.
#include "threads.h"

#include <cstdlib>
#include <memory>
#include <numeric>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
unsigned char* dynamic_shared = nullptr;

std::map<std::string, Kernel>& kernels() {
    static auto* all = new std::map<std::string, Kernel>;  // never destroyed: used until the very end
    return *all;
}

void register_kernel(const char* name, void (*kernel)(), Invoke invoke,
                     std::vector<Parameter> parameters, int max_threads) {
    kernels()[name] = Kernel{name, kernel, invoke, std::move(parameters), max_threads};
}

namespace {
constexpr size_t stack_bytes = 256 * 1024;

// Where a function may be continued. Not a jmp_buf: the C library's longjmp looks through the thread's cleanup
// handlers each time.
struct Place {
    void* words[5];
};

// GCC forbids setjmp and longjmp on one buffer in one function, and must not learn that this call never
// returns, nor, with `enter` and `wait`, that it leaves variables and registers as they are.
__attribute__((noipa)) void go_to(Place& place) { __builtin_longjmp(place.words, 1); }

struct Fiber {
    Place place;
    ucontext_t entry;
    bool entered = false;
};

struct Thread {
    Fiber* fiber = nullptr;
    WarpOperation operation = WarpOperation::sync;
    unsigned mask = 0;
    int source = 0;
    uint64_t value = 0, result = 0;
};

struct Warp {
    uint32_t live = 0, at_barrier = 0, at_exchange = 0;
};

// The block that runs.
const Kernel* running = nullptr;
void** running_arguments = nullptr;
int thread_count = 0, started = 0, current = 0, exited = 0;
bool descending = false;
Thread threads[1024];
Warp warps[32];

Place scheduler;
Fiber* current_fiber = nullptr;
std::vector<Fiber*> idle_fibers;

void set_place(int thread) {
    current = thread;
    if (blockDim.y == 1 && blockDim.z == 1) {
        threadIdx.x = thread;
    } else {
        threadIdx.x = thread % blockDim.x;
        threadIdx.y = thread / blockDim.x % blockDim.y;
        threadIdx.z = thread / blockDim.x / blockDim.y;
    }
}

// A fiber's whole life: it runs threads that have not started yet, and then waits for the next block.
// Between two of its statements other fibers may run: nothing is kept in local variables.
void fiber_main() {
    for (;;) {
        while (started < thread_count) {
            int number = started++;
            set_place(descending ? thread_count - 1 - number : number);
            running->invoke(running->kernel, running_arguments);
            warps[current / 32].live &= ~(1u << (current % 32));
            ++exited;
        }
        idle_fibers.push_back(current_fiber);
        if (__builtin_setjmp(current_fiber->place.words) == 0) go_to(scheduler);
    }
}

Fiber* new_fiber() {
    auto* fiber = new Fiber;
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, stack_bytes + page, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) kernel_failure("no memory for a fiber's stack");
    mprotect(memory, page, PROT_NONE);  // stacks grow down: an overflow must crash
    getcontext(&fiber->entry);
    fiber->entry.uc_stack.ss_sp = static_cast<char*>(memory) + page;
    // Stacks that all begin at the same place in their pages would fight for the same cache lines.
    static size_t made = 0;
    fiber->entry.uc_stack.ss_size = stack_bytes - made++ * 320 % 4096;
    fiber->entry.uc_link = nullptr;
    makecontext(&fiber->entry, fiber_main, 0);
    return fiber;
}

// From the scheduler to a fiber; comes back when that fiber has nothing more to run.
__attribute__((noipa)) void enter(Fiber* fiber) {
    current_fiber = fiber;
    if (__builtin_setjmp(scheduler.words) == 0) {
        if (fiber->entered) go_to(fiber->place);
        fiber->entered = true;
        setcontext(&fiber->entry);
    }
}

// From a thread that must wait to the scheduler; comes back when the thread may go on.
__attribute__((noipa)) void wait() {
    threads[current].fiber = current_fiber;
    if (__builtin_setjmp(current_fiber->place.words) == 0) go_to(scheduler);
}

void resume(int thread) {
    set_place(thread);
    enter(threads[thread].fiber);
}

void start_threads() {
    while (started < thread_count) {
        if (idle_fibers.empty()) idle_fibers.push_back(new_fiber());
        Fiber* fiber = idle_fibers.back();
        idle_fibers.pop_back();
        enter(fiber);
    }
}

template <class Visit>
void each_lane(uint32_t lanes, Visit visit) {
    for (; lanes; lanes &= lanes - 1) visit(__builtin_ctz(lanes));
}

// Completes one exchange of the warp, if all that it waits for are there.
bool exchange(int number) {
    Warp& warp = warps[number];
    Thread* members = threads + 32 * number;
    for (uint32_t candidates = warp.at_exchange; candidates;) {
        int first = __builtin_ctz(candidates);
        uint32_t group = members[first].mask & warp.live;
        bool complete = (group & ~warp.at_exchange) == 0;
        each_lane(group & warp.at_exchange, [&](int lane) {
            if (members[lane].mask != members[first].mask) complete = false;
        });
        if (!complete) {
            candidates &= ~(1u << first);
            continue;
        }
        uint64_t ballot = 0;
        each_lane(group, [&](int lane) {
            if (members[lane].operation != members[first].operation)
                kernel_failure("threads of a warp wait at different warp operations");
            if (members[lane].value) ballot |= uint64_t{1} << lane;
        });
        each_lane(group, [&](int lane) {
            Thread& member = members[lane];
            bool defined = member.source >= 0 && member.source < 32 && (group >> member.source & 1);
            member.result = member.operation == WarpOperation::ballot ? ballot
                            : defined                                 ? members[member.source].value
                                                                      : ~uint64_t{0};
        });
        warp.at_exchange &= ~group;
        each_lane(group, [&](int lane) { resume(32 * number + lane); });
        return true;
    }
    return false;
}

bool release_barrier() {
    int count = (thread_count + 31) / 32;
    for (int warp = 0; warp < count; ++warp)
        if (warps[warp].at_barrier != warps[warp].live) return false;
    uint32_t waiting[32];
    for (int warp = 0; warp < count; ++warp) {
        waiting[warp] = warps[warp].at_barrier;
        warps[warp].at_barrier = 0;
    }
    for (int step = 0; step < count; ++step) {
        int warp = descending ? count - 1 - step : step;
        each_lane(waiting[warp], [&](int lane) { resume(32 * warp + lane); });
    }
    return true;
}

void run_block() {
    started = exited = 0;
    for (int warp = 0; 32 * warp < thread_count; ++warp) {
        int size = thread_count - 32 * warp;
        warps[warp] = Warp{size >= 32 ? 0xffffffffu : (1u << size) - 1, 0, 0};
    }
    set_place(0);
    threadIdx.y = threadIdx.z = 0;
    start_threads();
    while (exited < thread_count) {
        bool progress = false;
        for (int warp = 0; 32 * warp < thread_count; ++warp)
            while (warps[warp].at_exchange && exchange(warp)) progress = true;
        if (exited < thread_count && release_barrier()) progress = true;
        if (!progress) kernel_failure("deadlock: not all threads reach the same barrier");
    }
}
}  // namespace

int lane() { return current % 32; }

void block_barrier() {
    warps[current / 32].at_barrier |= 1u << (current % 32);
    wait();
}

uint64_t warp_exchange(WarpOperation operation, unsigned mask, uint64_t value, int source) {
    Thread& thread = threads[current];
    if (!(mask >> (current % 32) & 1)) kernel_failure("a thread is not in its own warp mask");
    thread.operation = operation;
    thread.mask = mask;
    thread.value = value;
    thread.source = source;
    warps[current / 32].at_exchange |= 1u << (current % 32);
    wait();
    return thread.result;
}

void kernel_failure(const char* what) {
    int barrier = 0, exchange = 0;
    for (int warp = 0; 32 * warp < thread_count; ++warp) {
        barrier += __builtin_popcount(warps[warp].at_barrier);
        exchange += __builtin_popcount(warps[warp].at_exchange);
    }
    fprintf(stderr,
            "emulated CUDA: kernel %s, block (%u, %u, %u): %s (thread (%u, %u, %u); of %d threads %d "
            "wait at a barrier, %d at a warp operation, %d have exited)\n",
            running ? running->name.c_str() : "?", blockIdx.x, blockIdx.y, blockIdx.z, what,
            threadIdx.x, threadIdx.y, threadIdx.z, thread_count, barrier, exchange, exited);
    fflush(stderr);
    abort();
}

// The order of the blocks of a launch: from `first` on, in steps of `stride`, which visits every block once.
struct BlockOrder {
    uint64_t first, stride;
};

// Returns the order of the next launch of `num` blocks, drawn by a linear congruential generator (Knuth's
// MMIX): the same in every run of a program.
static BlockOrder next_order(uint64_t num) {
    static uint64_t state = 1;
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint64_t drawn = state >> 33, stride = num > 1 ? 1 + drawn / num % (num - 1) : 1;
    while (std::gcd(stride, num) != 1) ++stride;
    return {drawn % num, stride};
}

void run_grid(const Kernel& kernel, dim3 grid, dim3 block, size_t shared_bytes, void** arguments) {
    // The end of the dynamic shared memory is where it is written past: a crash is not certain, but
    // what was there before is not left to be read.
    static std::vector<uint64_t> shared;
    shared.assign(shared_bytes / 8 + 3, ~uint64_t{0});
    auto address = reinterpret_cast<uintptr_t>(shared.data());
    dynamic_shared = reinterpret_cast<unsigned char*>((address + 15) / 16 * 16);

    running = &kernel;
    running_arguments = arguments;
    gridDim = grid;
    blockDim = block;
    thread_count = static_cast<int>(block.x * block.y * block.z);
    uint64_t num = uint64_t{grid.x} * grid.y * grid.z;
    auto [number, stride] = next_order(num);
    for (uint64_t turn = 0; turn < num; ++turn, number = (number + stride) % num) {
        blockIdx.x = static_cast<unsigned>(number % grid.x);
        blockIdx.y = static_cast<unsigned>(number / grid.x % grid.y);
        blockIdx.z = static_cast<unsigned>(number / grid.x / grid.y);
        descending = number % 2 == 1;
        run_block();
    }
    running = nullptr;
}
}  // namespace emulator
