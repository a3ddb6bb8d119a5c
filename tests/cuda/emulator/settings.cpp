// The emulator's settings (environment), its log, and the message at an invalid memory access.
//
// PHALANX_EMULATED_CUDA: comma-separated devices=N (1), memory=BYTES of each device (64 GiB, counted
// per process), driver=VERSION (13000), capability=MAJOR*10+MINOR (90), pools=0|1 (1),
// ipc=0|1|lossy|faulty (1), products=N algorithms of each matrix product (1), order=lazy|eager (lazy), pageable=late|staged (late: copies treat all host memory as pinned;
// staged: as real drivers do, asynchronous copies from ordinary memory read it at once, those to it wait).
// CUDA_VISIBLE_DEVICES: numbers, as in CUDA; no UUIDs.
// PHALANX_EMULATED_CUDA_LOG=FILE: a line for each call that allocates, frees, synchronises, captures or
// instantiates, and at exit a line with the number of calls for each function.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <unistd.h>

#include "internal.h"

namespace emulator {
std::string running_operation;

namespace {
std::recursive_mutex& lock() {
    static auto* lock = new std::recursive_mutex;  // never destroyed: threads may outlive main
    return *lock;
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    for (size_t start = 0; start <= text.size();) {
        size_t end = std::min(text.find(separator, start), text.size());
        parts.push_back(text.substr(start, end - start));
        start = end + 1;
    }
    return parts;
}

[[noreturn]] void bad_setting(const std::string& what) {
    fprintf(stderr, "emulated CUDA: PHALANX_EMULATED_CUDA: cannot read \"%s\"\n", what.c_str());
    exit(2);
}

Settings read_settings() {
    Settings read;
    long devices = 1;
    const char* text = getenv("PHALANX_EMULATED_CUDA");
    for (const std::string& part : split(text ? text : "", ',')) {
        if (part.empty()) continue;
        size_t equals = part.find('=');
        if (equals == std::string::npos) bad_setting(part);
        std::string key = part.substr(0, equals), value = part.substr(equals + 1);
        if (key == "order") {
            if (value != "lazy" && value != "eager") bad_setting(part);
            read.eager = value == "eager";
            continue;
        }
        if (key == "ipc") {
            if (value != "0" && value != "1" && value != "lossy" && value != "faulty") bad_setting(part);
            read.ipc = value != "0";
            read.keeps_peer_writes = value != "lossy";
            read.reaches_peers = value != "faulty";
            continue;
        }
        if (key == "pageable") {
            if (value != "late" && value != "staged") bad_setting(part);
            read.staged = value == "staged";
            continue;
        }
        char* end = nullptr;
        long long number = strtoll(value.c_str(), &end, 10);
        if (value.empty() || *end || number < 0) bad_setting(part);
        if (key == "devices") devices = number;
        else if (key == "memory") read.memory = static_cast<size_t>(number);
        else if (key == "driver") read.driver = static_cast<int>(number);
        else if (key == "capability") read.capability = static_cast<int>(number);
        else if (key == "pools") read.pools = number != 0;
        else if (key == "products") read.products = static_cast<int>(number);
        else bad_setting(part);
    }
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int device = 0; device < devices; ++device) read.visible.push_back(device);
        return read;
    }
    // As in CUDA, the list ends before the first number that is no device.
    for (const std::string& part : split(visible, ',')) {
        char* end = nullptr;
        long number = strtol(part.c_str(), &end, 10);
        if (part.empty() || *end || number < 0 || number >= devices) break;
        read.visible.push_back(static_cast<int>(number));
    }
    return read;
}

int log_file() {
    static int file = [] {
        const char* path = getenv("PHALANX_EMULATED_CUDA_LOG");
        return path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    }();
    return file;
}

std::map<std::string, Counter>& counters() {
    static auto* all = new std::map<std::string, Counter>;
    return *all;
}

void write_line(const std::string& line) {
    // One write per line: lines of several processes do not mix.
    ssize_t written = write(log_file(), line.data(), line.size());
    (void)written;
}

__attribute__((destructor)) void write_summary() {
    if (log_file() < 0 || !lock().try_lock()) return;
    for (const auto& [name, counter] : counters())
        write_line("pid=" + std::to_string(getpid()) + " summary " + name +
                   " calls=" + std::to_string(counter.calls) + "\n");
    lock().unlock();
}

struct sigaction previous_segv, previous_bus, previous_ill;

void on_invalid_access(int signal, siginfo_t* information, void*) {
    sigaction(SIGSEGV, &previous_segv, nullptr);
    sigaction(SIGBUS, &previous_bus, nullptr);
    sigaction(SIGILL, &previous_ill, nullptr);
    // The access repeats after the return, and meets the handler that was there before.
    if (running_operation.empty()) return;
    char text[300];
    // the address of a misaligned access is that of the instruction, which says nothing
    int length = signal == SIGILL
        ? snprintf(text, sizeof text, "emulated CUDA: misaligned memory access in %s\n",
                   running_operation.c_str())
        : snprintf(text, sizeof text, "emulated CUDA: invalid memory access at %p (signal %d) in %s\n",
                   information->si_addr, signal, running_operation.c_str());
    ssize_t written = write(2, text, static_cast<size_t>(length) < sizeof text ? length : sizeof text - 1);
    (void)written;
}
}  // namespace

const Settings& settings() {
    static const auto* read = new Settings(read_settings());
    return *read;
}

Counter* counter(const char* name) {
    Counter& found = counters()[name];
    found.name = name;
    return &found;
}

Call::Call(const char* name, Counter*& where) : guard(lock()) {
    if (!where) where = counter(name);
    ++where->calls;
}

void log_call(const char* name, long long bytes) {
    if (log_file() < 0) return;
    std::string line = "pid=" + std::to_string(getpid()) + " " + name;
    if (bytes >= 0) line += " bytes=" + std::to_string(bytes);
    write_line(line + "\n");
}

void report_invalid_accesses() {
    struct sigaction action = {};
    action.sa_sigaction = on_invalid_access;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
    // kernels are compiled to trap on misaligned accesses
    sigaction(SIGILL, &action, &previous_ill);
}
}  // namespace emulator

API int phalanx_emulator_num_products() { return emulator::settings().products; }
API void phalanx_emulator_count(const char* name) {
    emulator::Counter* where = nullptr;
    emulator::Call call(name, where);
}
