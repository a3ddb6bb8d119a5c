// cuBLASLt's functions: descriptors, heuristics, and multiplication as an operation of a stream of the
// emulated driver.
//
// Matrices are column-major, f32 or bf16, with the combinations, epilogues and conditions that NVIDIA's
// documentation names; all else gives CUBLAS_STATUS_NOT_SUPPORTED. Pointers are read when the operation
// runs; alpha and beta in host pointer mode when cublasLtMatmul is called.
//
// Limits: sums are exacter than the real ones (f64, see gemm.cpp); no other orders, types, scalings or
// layouts; no algorithm needs workspace. There are as many as the setting products says, all with the same
// sums; where there are several, the one that is named first takes two milliseconds longer.
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>

#include "matmul.h"

using namespace cublaslt;

// Of the emulated driver, see internal.h.
API CUresult phalanx_emulator_enqueue(CUstream stream, const char* name, const std::function<void()>* work);
API void phalanx_emulator_count(const char* name);
API int phalanx_emulator_num_products();
API CUresult cuCtxGetCurrent(CUcontext* context);

namespace {
struct Preference {
    uint64_t values[16] = {};
};

struct Algorithm {
    uint64_t data[8];
};
struct Heuristic {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
constexpr uint64_t algorithm_mark = 0x5068616c616e78;

int num_algorithms() {
    return phalanx_emulator_num_products();
}

bool is_algorithm(const Algorithm& algorithm) {
    return algorithm.data[0] == algorithm_mark && algorithm.data[1] < static_cast<uint64_t>(num_algorithms());
}

struct Field {
    void* at;
    size_t bytes;
};
#define FIELD(number, member) case number: return {&from.member, sizeof from.member};
Field field(Description& from, int attribute) {
    switch (attribute) {
        FIELD(0, compute) FIELD(1, scale) FIELD(2, pointer_mode) FIELD(3, transa) FIELD(4, transb)
        FIELD(5, transc) FIELD(6, fill) FIELD(7, epilogue) FIELD(8, bias) FIELD(10, bias_stride)
        FIELD(11, aux) FIELD(12, aux_ld) FIELD(13, aux_stride) FIELD(14, vector_stride)
        FIELD(15, multiprocessors) FIELD(17, scales[0]) FIELD(18, scales[1]) FIELD(19, scales[2])
        FIELD(20, scales[3]) FIELD(21, maxima[0]) FIELD(22, aux_type) FIELD(23, maxima[1])
        FIELD(24, maxima[2]) FIELD(25, fast_sums) FIELD(26, bias_type)
    }
    return {nullptr, 0};
}
Field field(Layout& from, int attribute) {
    switch (attribute) {
        FIELD(0, type) FIELD(1, order) FIELD(2, rows) FIELD(3, columns) FIELD(4, ld) FIELD(5, batch)
        FIELD(6, stride) FIELD(7, plane)
    }
    return {nullptr, 0};
}

template <class T>
Status set(T* object, int attribute, const void* value, size_t bytes) {
    Field target = object ? field(*object, attribute) : Field{nullptr, 0};
    if (!target.at || !value || bytes != target.bytes) return INVALID_VALUE;
    memcpy(target.at, value, bytes);
    return SUCCESS;
}
template <class T>
Status get(T* object, int attribute, void* value, size_t bytes, size_t* written) {
    Field source = object ? field(*object, attribute) : Field{nullptr, 0};
    if (!source.at) return INVALID_VALUE;
    if (written) *written = source.bytes;
    if (bytes == 0) return written ? SUCCESS : INVALID_VALUE;
    if (!value || bytes < source.bytes) return INVALID_VALUE;
    memcpy(value, source.at, source.bytes);
    return SUCCESS;
}

template <class T>
Status create(T** result, const T& value) {
    if (!result) return INVALID_VALUE;
    *result = new T(value);
    return SUCCESS;
}
template <class T>
Status destroy(T* object) {
    delete object;
    return SUCCESS;
}
}  // namespace

#define LT API int
#define COUNT phalanx_emulator_count(__func__)

API size_t cublasLtGetVersion() { return 120900; }
API size_t cublasLtGetCudartVersion() { return 12090; }
API const char* cublasLtGetStatusName(int status) {
    switch (status) {
        case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return "CUBLAS_STATUS unknown";
    }
}

LT cublasLtCreate(void** handle) {
    COUNT;
    CUcontext context = nullptr;
    if (cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context) return NOT_INITIALIZED;
    if (!handle) return INVALID_VALUE;
    *handle = new int(0);
    return SUCCESS;
}
LT cublasLtDestroy(void* handle) {
    COUNT;
    return destroy(static_cast<int*>(handle));
}

LT cublasLtMatmulDescCreate(Description** result, int compute, int scale) {
    Description made;
    made.compute = compute, made.scale = scale;
    return create(result, made);
}
LT cublasLtMatmulDescDestroy(Description* object) { return destroy(object); }
LT cublasLtMatmulDescSetAttribute(Description* object, int attribute, const void* value, size_t bytes) {
    return set(object, attribute, value, bytes);
}
LT cublasLtMatmulDescGetAttribute(Description* object, int attribute, void* value, size_t bytes,
    size_t* written) {
    return get(object, attribute, value, bytes, written);
}

LT cublasLtMatrixLayoutCreate(Layout** result, int type, uint64_t rows, uint64_t columns, int64_t ld) {
    Layout made;
    made.type = type, made.rows = rows, made.columns = columns, made.ld = ld;
    return create(result, made);
}
LT cublasLtMatrixLayoutDestroy(Layout* object) { return destroy(object); }
LT cublasLtMatrixLayoutSetAttribute(Layout* object, int attribute, const void* value, size_t bytes) {
    return set(object, attribute, value, bytes);
}
LT cublasLtMatrixLayoutGetAttribute(Layout* object, int attribute, void* value, size_t bytes,
    size_t* written) {
    return get(object, attribute, value, bytes, written);
}

LT cublasLtMatmulPreferenceCreate(Preference** result) { return create(result, Preference()); }
LT cublasLtMatmulPreferenceDestroy(Preference* object) { return destroy(object); }
LT cublasLtMatmulPreferenceSetAttribute(Preference* object, int attribute, const void* value, size_t bytes) {
    if (!object || !value || attribute < 0 || attribute > 15 || (bytes != 4 && bytes != 8)) return INVALID_VALUE;
    memcpy(&object->values[attribute], value, bytes);
    return SUCCESS;
}

LT cublasLtMatmulAlgoGetHeuristic(void* handle, Description* what, Layout* a, Layout* b, Layout* c, Layout* d,
                                  Preference* preference, int requested, Heuristic* results, int* count) {
    COUNT;
    if (!handle || !what || !a || !b || !c || !d) return INVALID_VALUE;
    if (!preference || requested < 1 || !results || !count) return INVALID_VALUE;
    *count = 0;
    Problem problem{*what, *a, *b, *c, *d};
    if (Status status = problem.check()) return status;
    for (; *count < requested && *count < num_algorithms(); ++*count) {
        Heuristic& found = results[*count] = Heuristic{};
        found.algorithm.data[0] = algorithm_mark;
        found.algorithm.data[1] = static_cast<uint64_t>(*count);
        found.state = SUCCESS;
        found.waves = 1;
    }
    return SUCCESS;
}

LT cublasLtMatmulAlgoCheck(void* handle, Description* what, Layout* a, Layout* b, Layout* c, Layout* d,
                           const Algorithm* algorithm, Heuristic* result) {
    COUNT;
    if (!handle || !what || !a || !b || !c || !d || !algorithm || !result) return INVALID_VALUE;
    if (!is_algorithm(*algorithm)) return NOT_SUPPORTED;
    Problem problem{*what, *a, *b, *c, *d};
    if (Status status = problem.check()) return status;
    *result = Heuristic{};
    result->algorithm = *algorithm;
    result->state = SUCCESS;
    result->waves = 1;
    return SUCCESS;
}

LT cublasLtMatmul(void* handle, Description* what, const void* alpha, const void* A, Layout* a, const void* B,
                  Layout* b, const void* beta, const void* C, Layout* c, void* D, Layout* d,
                  const Algorithm* algorithm, void*, size_t, CUstream stream) {
    COUNT;
    if (!handle || !what || !alpha || !A || !a || !B || !b || !beta || !c || !D || !d) return INVALID_VALUE;
    if (algorithm && !is_algorithm(*algorithm)) return INVALID_VALUE;
    bool is_slow = num_algorithms() > 1 && (!algorithm || algorithm->data[1] == 0);
    Problem problem{*what, *a, *b, *c, *d, A, B, C, D};
    if (Status status = problem.check()) return status;
    if (problem.what.pointer_mode == 0) {
        problem.alpha = *static_cast<const float*>(alpha);
        problem.beta = *static_cast<const float*>(beta);
    } else {
        problem.device_alpha = static_cast<const float*>(alpha);
        problem.device_beta = static_cast<const float*>(beta);
        problem.beta = 1;  // not known yet: C must be there
    }
    if (problem.beta != 0 && !C) return INVALID_VALUE;
    if ((problem.has_vector() && !what->bias) || (problem.has(AUX) && !what->aux)) return INVALID_VALUE;
    if (!problem.in_device_memory()) return EXECUTION_FAILED;
    std::function<void()> work = [problem, is_slow] {
        if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        problem.run();
    };
    CUresult result = phalanx_emulator_enqueue(stream, "cublasLtMatmul", &work);
    return result == CUDA_SUCCESS ? SUCCESS : EXECUTION_FAILED;
}
