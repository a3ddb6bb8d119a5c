// Stream capture and graphs.
//
// A graph is a list of nodes in the order of their capture. A launch is one operation of its stream; it
// runs, of the nodes whose predecessors have run, the one captured last: an edge that is missing shows.
//
// What a capture forbids fails as in CUDA and invalidates the capture. Counted as unsafe calls, which
// captures of mode GLOBAL forbid to all threads and THREAD_LOCAL to their own: allocations and frees,
// synchronous copies, event queries and synchronisations, module loads. Limits: graphs come from captures
// only, and cannot be changed or updated; no memory nodes (cuMemAllocAsync in a capture fails).
#include "internal.h"

#include <algorithm>

namespace emulator {
struct GraphExec {
    std::shared_ptr<const Graph> graph;
    OperationRef last_launch;  // launches of the same executable graph do not overlap
};

namespace {
std::unordered_set<Graph*> live_graphs;
std::unordered_set<GraphExec*> live_executables;
std::vector<std::shared_ptr<Capture>> captures;  // those that have not ended
thread_local CaptureMode thread_mode = CAPTURE_GLOBAL;

void add_once(std::vector<int>& to, const std::vector<int>& nodes) {
    for (int node : nodes)
        if (std::find(to.begin(), to.end(), node) == to.end()) to.push_back(node);
}

void end(const std::shared_ptr<Capture>& capture) {
    capture->active = false;
    for (Stream* stream : capture->streams) {
        stream->capture = nullptr;
        stream->frontier.clear();
    }
    captures.erase(std::find(captures.begin(), captures.end(), capture));
}

// Whether the origin's next node would come after everything that the other streams did.
bool joined(const Capture& capture) {
    std::vector<bool> reached(capture.graph->nodes.size());
    for (int node : capture.origin->frontier) reached[node] = true;
    for (size_t node = reached.size(); node-- > 0;)
        if (reached[node])
            for (int before : capture.graph->nodes[node].after) reached[before] = true;
    for (const Stream* stream : capture.streams)
        for (int node : stream->frontier)
            if (!reached[node]) return false;
    return true;
}

void run_graph(const Graph& graph) {
    size_t count = graph.nodes.size();
    std::vector<int> missing(count);
    std::vector<std::vector<int>> successors(count);
    std::vector<int> ready;  // a heap: the node captured last is on top
    for (size_t node = 0; node < count; ++node) {
        missing[node] = static_cast<int>(graph.nodes[node].after.size());
        for (int before : graph.nodes[node].after) successors[before].push_back(static_cast<int>(node));
        if (missing[node] == 0) ready.push_back(static_cast<int>(node));
    }
    std::make_heap(ready.begin(), ready.end());
    while (!ready.empty()) {
        std::pop_heap(ready.begin(), ready.end());
        int node = ready.back();
        ready.pop_back();
        running_operation = "graph: " + graph.nodes[node].name;
        graph.nodes[node].work();
        for (int next : successors[node])
            if (--missing[next] == 0) {
                ready.push_back(next);
                std::push_heap(ready.begin(), ready.end());
            }
    }
}
}  // namespace

CUresult forbid_in_capture(Capture& capture, CUresult error) {
    if (capture.active) capture.invalid = true;
    return error;
}

void abandon_capture(Stream* stream) {
    std::shared_ptr<Capture> capture = stream->capture;
    capture->invalid = true;
    if (capture->origin == stream) return end(capture);
    stream->capture = nullptr;
    capture->streams.erase(std::find(capture->streams.begin(), capture->streams.end(), stream));
}

CUresult check_unsafe_call() {
    if (thread_mode == CAPTURE_RELAXED) return CUDA_SUCCESS;
    for (const auto& capture : captures) {
        bool own = capture->thread == std::this_thread::get_id();
        bool forbidden = (own && capture->mode != CAPTURE_RELAXED) ||
                         (capture->mode == CAPTURE_GLOBAL && thread_mode == CAPTURE_GLOBAL);
        if (forbidden) return forbid_in_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    return CUDA_SUCCESS;
}

CUresult check_null_stream(Context* context) {
    for (const auto& capture : captures)
        for (const Stream* stream : capture->streams)
            if (stream->context == context && stream->blocking)
                return forbid_in_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    return CUDA_SUCCESS;
}

bool any_capture(Context* context, CUresult* error) {
    for (const auto& capture : captures)
        for (const Stream* stream : capture->streams)
            if (stream->context == context) {
                *error = forbid_in_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
                return true;
            }
    return false;
}

CUresult capture_operation(Stream* stream, std::string name, Work work) {
    Capture& capture = *stream->capture;
    if (capture.invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    int node = static_cast<int>(capture.graph->nodes.size());
    capture.graph->nodes.push_back(Node{std::move(name), std::move(work), stream->frontier});
    stream->frontier = {node};
    return CUDA_SUCCESS;
}

CUresult capture_wait(Stream* stream, Event* event) {
    if (event->capture && !event->capture->active) {
        if (stream->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (!event->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (event->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->capture && stream->capture != event->capture) {
        forbid_in_capture(*event->capture, 0);
        return forbid_in_capture(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    if (!stream->capture) {
        if (stream == &stream->context->null_stream)
            return forbid_in_capture(*event->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        stream->capture = event->capture;
        stream->frontier.clear();
        event->capture->streams.push_back(stream);
    }
    add_once(stream->frontier, event->nodes);
    return CUDA_SUCCESS;
}
}  // namespace emulator

using namespace emulator;

// ---- captures ----------------------------------------------------------------------------------------
API CUresult cuStreamBeginCapture_v2(CUstream handle, CaptureMode mode) {
    CALL;
    NEED_STREAM(handle);
    log_call("cuStreamBeginCapture_v2");
    if (stream == &context->null_stream) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (mode < CAPTURE_GLOBAL || mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) return forbid_in_capture(*stream->capture, CUDA_ERROR_ILLEGAL_STATE);
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->streams = {stream};
    capture->graph = std::make_unique<Graph>();
    stream->capture = capture;
    stream->frontier.clear();
    captures.push_back(capture);
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream handle, CUgraph* result) {
    CALL;
    NEED_STREAM(handle);
    log_call("cuStreamEndCapture");
    *result = nullptr;
    std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return forbid_in_capture(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    if (capture->mode != CAPTURE_RELAXED && capture->thread != std::this_thread::get_id())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool complete = capture->invalid || joined(*capture);
    end(capture);
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!complete) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *result = capture->graph.release();
    live_graphs.insert(*result);
    return CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream handle, int* status) {
    CALL;
    NEED_STREAM(handle);
    if (stream == &context->null_stream)
        if (CUresult error = check_null_stream(context)) return error;
    *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
    return CUDA_SUCCESS;
}

API CUresult cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
    CALL;
    if (*mode < CAPTURE_GLOBAL || *mode > CAPTURE_RELAXED) return CUDA_ERROR_INVALID_VALUE;
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}

// ---- graphs ------------------------------------------------------------------------------------------
API CUresult cuGraphInstantiateWithFlags(CUgraphExec* handle, CUgraph graph, unsigned long long) {
    CALL;
    log_call("cuGraphInstantiateWithFlags");
    if (!live_graphs.count(graph)) return CUDA_ERROR_INVALID_VALUE;
    auto* executable = new GraphExec{std::make_shared<const Graph>(*graph), nullptr};
    live_executables.insert(executable);
    *handle = executable;
    return CUDA_SUCCESS;
}

API CUresult cuGraphUpload(CUgraphExec executable, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    return live_executables.count(executable) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    CALL;
    NEED_STREAM(handle);
    if (!live_executables.count(executable)) return CUDA_ERROR_INVALID_VALUE;
    std::shared_ptr<const Graph> graph = executable->graph;
    if (!stream->capture && executable->last_launch && !executable->last_launch->done &&
        executable->last_launch->stream != stream)
        stream->waits.push_back(executable->last_launch);
    OperationRef launch;
    CUresult result = enqueue(stream, "graph", [graph] { run_graph(*graph); }, &launch);
    if (launch) executable->last_launch = launch;
    return result;
}

// The number of nodes; the nodes themselves are not offered.
API CUresult cuGraphGetNodes(CUgraph graph, void** nodes, size_t* count) {
    CALL;
    if (!live_graphs.count(graph) || !count) return CUDA_ERROR_INVALID_VALUE;
    if (nodes) return CUDA_ERROR_NOT_SUPPORTED;
    *count = graph->nodes.size();
    return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph graph) {
    CALL;
    if (!live_graphs.erase(graph)) return CUDA_ERROR_INVALID_VALUE;
    delete graph;
    return CUDA_SUCCESS;
}

API CUresult cuGraphExecDestroy(CUgraphExec executable) {
    CALL;
    if (!live_executables.erase(executable)) return CUDA_ERROR_INVALID_VALUE;
    delete executable;
    return CUDA_SUCCESS;
}
