// A multiplication as cublasLtMatmul is asked for it: its descriptors, what is checked, how it runs.
#pragma once
#include "abi.h"
#include "gemm.h"

// Of the emulated driver, see internal.h.
API int phalanx_emulator_device_range(CUdeviceptr address, size_t bytes);

namespace cublaslt {
using gemm::Format;

enum Status : int {
    SUCCESS = 0,
    NOT_INITIALIZED = 1,
    INVALID_VALUE = 7,
    EXECUTION_FAILED = 13,
    NOT_SUPPORTED = 15
};
enum : int { R_32F = 0, R_16BF = 14, UNSET_TYPE = -1 };
enum : int { COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, FAST_16BF = 75, FAST_TF32 = 77 };
// Epilogues are sums of these; BGRADA and BGRADB stand alone.
enum : unsigned {
    DEFAULT = 1,
    RELU = 2,
    BIAS = 4,
    DRELU = 8,
    BGRAD = 16,
    GELU = 32,
    DGELU = 64,
    AUX = 128,
    BGRADA = 256,
    BGRADB = 512
};

struct Layout {
    int type = R_32F, order = 0, batch = 1;
    uint64_t rows = 0, columns = 0;
    int64_t ld = 0, stride = 0, plane = 0;
};

struct Description {
    int compute = COMPUTE_32F, scale = R_32F, pointer_mode = 0;
    int transa = 0, transb = 0, transc = 0, fill = 2;
    unsigned epilogue = DEFAULT;
    void* bias = nullptr;
    int64_t bias_stride = 0;
    void* aux = nullptr;
    int64_t aux_ld = 0, aux_stride = 0, vector_stride = 0;
    int multiprocessors = 0, bias_type = UNSET_TYPE, aux_type = UNSET_TYPE;
    void* scales[4] = {};  // of A, B, C, D: for 8-bit floats only
    void* maxima[3] = {};
    int8_t fast_sums = 0;
};

inline Format format_of(int type) { return type == R_32F ? Format::f32 : Format::bf16; }

// One multiplication, as it is when cublasLtMatmul is called.
struct Problem {
    Description what;
    Layout a, b, c, d;
    const void *A = nullptr, *B = nullptr, *C = nullptr;
    void* D = nullptr;
    float alpha = 1, beta = 0;
    const float *device_alpha = nullptr, *device_beta = nullptr;

    // Of D = epilogue(alpha * op(A) * op(B) + beta * C): D has m rows and n columns.
    size_t m() const { return d.rows; }
    size_t n() const { return d.columns; }
    size_t k() const { return what.transa ? a.rows : a.columns; }
    bool has(unsigned part) const { return (what.epilogue & part) != 0; }
    bool has_vector() const { return has(BIAS | BGRAD | BGRADA | BGRADB); }
    bool has_mask() const { return has(AUX) && has(RELU | DRELU); }
    size_t vector_length() const { return has(BGRADB) ? n() : m(); }
    Format vector_format() const {
        return format_of(what.bias_type == UNSET_TYPE ? d.type : what.bias_type);
    }
    Format aux_format() const {
        return format_of(what.aux_type == UNSET_TYPE ? d.type : what.aux_type);
    }

    Status check() const;           // whether the library can do this
    bool in_device_memory() const;  // tells on stderr what is not
    void run() const;

   private:
    void run_one(int batch, float alpha, float beta) const;
};
}  // namespace cublaslt
