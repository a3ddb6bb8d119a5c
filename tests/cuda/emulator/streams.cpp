// Streams and events: queues of operations that run as late as the API allows.
//
// An operation runs when something waits for it (a synchronisation, a synchronous copy, the second
// query of the same place), after what it depends on and nothing else: the earlier operations of its
// stream and, through event waits, those of other streams up to where the event was recorded. The null
// stream and the streams that are not NON_BLOCKING wait for each other as in CUDA.
//
// Limits: a wait holds the emulator's one lock, so threads of a process take turns; host functions must
// not wait for other threads; there is no per-thread default stream; what is never waited for never runs.
#include "internal.h"

#include <algorithm>

namespace emulator {
namespace {
std::unordered_set<Stream*> live_streams;
std::unordered_set<Event*> live_events;

CUstream const legacy_handle = reinterpret_cast<CUstream>(1);

// A destroyed stream is kept until its operations have run.
void forget_destroyed(Context* context) {
    context->streams.remove_if(
        [](const std::unique_ptr<Stream>& stream) { return stream->destroyed && stream->queue.empty(); });
}

void depend(Operation& operation, const OperationRef& on) {
    if (on && !on->done && on->stream != operation.stream) operation.after.push_back(on);
}

void run_context(Context* context) {
    // The latest stream first: a dependency that was never stated is not kept by chance.
    for (auto stream = context->streams.rbegin(); stream != context->streams.rend(); ++stream)
        run_until((*stream)->last);
    run_until(context->null_stream.last);
    forget_destroyed(context);
}

// Queries answer "not ready" once, and then run what is asked for.
CUresult query(const OperationRef& operation) {
    if (!operation || operation->done) return CUDA_SUCCESS;
    if (!operation->queried) {
        operation->queried = true;
        return CUDA_ERROR_NOT_READY;
    }
    run_until(operation);
    return CUDA_SUCCESS;
}

CUresult check_event(CUevent event) {
    if (!live_events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture) return forbid_in_capture(*event->capture, CUDA_ERROR_CAPTURED_EVENT);
    return check_unsafe_call();
}
}  // namespace

Stream* stream_of(CUstream handle) {
    if (!handle || handle == legacy_handle) return current_context() ? &current_context()->null_stream : nullptr;
    return live_streams.count(handle) ? handle : nullptr;
}

CUresult enqueue(Stream* stream, std::string name, Work work, OperationRef* result) {
    if (stream->capture) return capture_operation(stream, std::move(name), std::move(work));
    Context* context = stream->context;
    bool is_null = stream == &context->null_stream;
    if (is_null)
        if (CUresult error = check_null_stream(context)) return error;

    auto operation = std::make_shared<Operation>();
    operation->name = std::move(name);
    operation->work = std::move(work);
    operation->stream = stream;
    for (const OperationRef& wait : stream->waits) depend(*operation, wait);
    stream->waits.clear();
    if (is_null) {
        for (const auto& other : context->streams)
            if (other->blocking) depend(*operation, other->last);
    } else if (stream->blocking) {
        depend(*operation, context->null_stream.last);
    }
    stream->queue.push_back(operation);
    stream->last = operation;
    if (result) *result = operation;
    if (settings().eager) run_until(operation);
    return CUDA_SUCCESS;
}

// Not recursive: chains of events can be long.
void run_until(const OperationRef& target) {
    if (!target) return;
    std::vector<OperationRef> wanted{target};
    while (!wanted.empty()) {
        if (wanted.back()->done) {
            wanted.pop_back();
            continue;
        }
        OperationRef next = wanted.back()->stream->queue.front();
        while (!next->after.empty() && next->after.back()->done) next->after.pop_back();
        if (!next->after.empty()) {
            wanted.push_back(next->after.back());
            continue;
        }
        next->stream->queue.pop_front();
        std::string outer = std::move(running_operation);
        running_operation = next->name;
        if (next->work) next->work();
        running_operation = std::move(outer);
        next->work = nullptr;
        next->finished = std::chrono::steady_clock::now();
        next->done = true;
    }
}

void run_everything() {
    for (int device = 0; Context* context = context_of(device); ++device) run_context(context);
}
}  // namespace emulator

using namespace emulator;

// ---- streams -----------------------------------------------------------------------------------------
API CUresult cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
    CALL;
    NEED_CONTEXT;
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    forget_destroyed(context);
    auto stream = std::make_unique<Stream>();
    stream->context = context;
    stream->blocking = flags == 0;
    stream->priority = priority;
    live_streams.insert(stream.get());
    *handle = stream.get();
    context->streams.push_back(std::move(stream));
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream* handle, unsigned flags) {
    return cuStreamCreateWithPriority(handle, flags, 0);
}

API CUresult cuStreamDestroy_v2(CUstream stream) {
    CALL;
    if (!live_streams.count(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) abandon_capture(stream);
    live_streams.erase(stream);
    stream->destroyed = true;
    forget_destroyed(stream->context);
    return CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    log_call("cuStreamSynchronize");
    if (stream->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream == &context->null_stream)
        if (CUresult error = check_null_stream(context)) return error;
    for (const OperationRef& wait : stream->waits) run_until(wait);
    stream->waits.clear();
    run_until(stream->last);
    return CUDA_SUCCESS;
}

API CUresult cuStreamQuery(CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    if (stream->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    for (const OperationRef& wait : stream->waits)
        if (CUresult result = query(wait)) return result;
    return query(stream->last);
}

API CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
    CALL;
    NEED_STREAM(handle);
    if (!live_events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture || event->capture) return capture_wait(stream, event);
    if (event->recorded && !event->recorded->done) stream->waits.push_back(event->recorded);
    return CUDA_SUCCESS;
}

API CUresult cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* data) {
    CALL;
    NEED_STREAM(handle);
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return enqueue(stream, "host function", [=] { function(data); });
}

API CUresult cuCtxSynchronize() {
    CALL;
    NEED_CONTEXT;
    log_call("cuCtxSynchronize");
    CUresult error = CUDA_SUCCESS;
    if (any_capture(context, &error)) return error;
    run_context(context);
    return CUDA_SUCCESS;
}

// ---- events ------------------------------------------------------------------------------------------
API CUresult cuEventCreate(CUevent* handle, unsigned flags) {
    CALL;
    NEED_CONTEXT;
    if (flags & ~3u) return CUDA_ERROR_INVALID_VALUE;  // blocking wait, no timing; not between processes
    auto* event = new Event;
    event->timing = !(flags & 2);
    live_events.insert(event);
    *handle = event;
    return context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuEventDestroy_v2(CUevent event) {
    CALL;
    if (!live_events.erase(event)) return CUDA_ERROR_INVALID_HANDLE;
    delete event;
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    if (!live_events.count(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        event->capture = stream->capture;
        event->nodes = stream->frontier;
        event->recorded = nullptr;
        return CUDA_SUCCESS;
    }
    OperationRef mark;
    if (CUresult error = enqueue(stream, "event", nullptr, &mark)) return error;
    event->recorded = mark;
    event->capture = nullptr;
    return CUDA_SUCCESS;
}

API CUresult cuEventQuery(CUevent event) {
    CALL;
    if (CUresult error = check_event(event)) return error;
    return query(event->recorded);
}

API CUresult cuEventSynchronize(CUevent event) {
    CALL;
    log_call("cuEventSynchronize");
    if (CUresult error = check_event(event)) return error;
    run_until(event->recorded);
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    CALL;
    if (!live_events.count(start) || !live_events.count(end)) return CUDA_ERROR_INVALID_HANDLE;
    if (start->capture || end->capture) return CUDA_ERROR_CAPTURED_EVENT;
    if (!start->timing || !end->timing || !start->recorded || !end->recorded) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->recorded->done || !end->recorded->done) return CUDA_ERROR_NOT_READY;
    std::chrono::duration<float, std::milli> elapsed = end->recorded->finished - start->recorded->finished;
    *milliseconds = elapsed.count();
    return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

// ---- for libcublasLt ---------------------------------------------------------------------------------
API CUresult phalanx_emulator_enqueue(CUstream handle, const char* name, const std::function<void()>* work) {
    CALL;
    NEED_STREAM(handle);
    return enqueue(stream, name, *work);
}
