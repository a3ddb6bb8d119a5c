// What of cublasLtMatmul is checked when it is called, and its work when the stream reaches it.
//
// Each element is rounded to D's type once, after the epilogue, and what BGRAD sums are the values before
// that rounding. A ReLU mask has one bit for each element, column by column, of this file's own order.
#include "matmul.h"

#include <cstdio>
#include <unordered_set>

namespace cublaslt {
Status Problem::check() const {
    for (const Layout* layout : {&a, &b, &c, &d}) {
        if (layout->type != R_32F && layout->type != R_16BF) return NOT_SUPPORTED;
        if (layout->order != 0 || layout->plane != 0) return NOT_SUPPORTED;
        if (layout->ld < static_cast<int64_t>(layout->rows)) return INVALID_VALUE;
        if (layout->rows == 0 || layout->columns == 0) return INVALID_VALUE;
        if (layout->batch != d.batch || d.batch < 1) return INVALID_VALUE;
    }
    if ((what.transb ? b.columns : b.rows) != k() || (what.transb ? b.rows : b.columns) != n() ||
        (what.transa ? a.columns : a.rows) != m() || c.rows != m() || c.columns != n())
        return INVALID_VALUE;
    // Which types go together.
    bool f32 = a.type == R_32F && b.type == R_32F && c.type == R_32F && d.type == R_32F;
    bool bf16 = a.type == R_16BF && b.type == R_16BF && c.type == d.type;
    if (what.scale != R_32F) return NOT_SUPPORTED;
    if (what.compute == FAST_TF32 || what.compute == FAST_16BF) {
        if (!f32) return NOT_SUPPORTED;
    } else if (what.compute == COMPUTE_32F || what.compute == COMPUTE_32F_PEDANTIC) {
        if (!f32 && !bf16) return NOT_SUPPORTED;
    } else {
        return NOT_SUPPORTED;
    }
    if (what.transa < 0 || what.transa > 2 || what.transb < 0 || what.transb > 2) return INVALID_VALUE;
    if (what.pointer_mode < 0 || what.pointer_mode > 4) return INVALID_VALUE;
    if (what.pointer_mode > 1 || what.transc != 0 || what.fill != 2) return NOT_SUPPORTED;
    for (const void* scale : what.scales)
        if (scale) return NOT_SUPPORTED;
    for (const void* maximum : what.maxima)
        if (maximum) return NOT_SUPPORTED;
    // The epilogue.
    static const std::unordered_set<unsigned> epilogues = {
        DEFAULT,          BIAS,
        RELU,             RELU | BIAS,         RELU | AUX,  RELU | AUX | BIAS,
        GELU,             GELU | BIAS,         GELU | AUX,  GELU | AUX | BIAS,
        DRELU | AUX,      DRELU | AUX | BGRAD, DGELU | AUX, DGELU | AUX | BGRAD,
        BGRADA,           BGRADB};
    if (!epilogues.count(what.epilogue)) return INVALID_VALUE;
    if (has_vector() && what.bias_type != UNSET_TYPE && what.bias_type != d.type) return NOT_SUPPORTED;
    if (has(AUX)) {
        int64_t unit = has_mask() ? 128 : 8;
        if (what.aux_ld < static_cast<int64_t>(m()) || what.aux_ld % unit != 0) return NOT_SUPPORTED;
        if (!has_mask() && what.aux_type != UNSET_TYPE && what.aux_type != d.type) return NOT_SUPPORTED;
    }
    return SUCCESS;
}

namespace {
bool in_range(const char* name, const void* address, const Layout& layout) {
    size_t last = (layout.batch - 1) * layout.stride + (layout.columns - 1) * layout.ld + layout.rows;
    size_t bytes = last * gemm::size_of(format_of(layout.type));
    if (phalanx_emulator_device_range(reinterpret_cast<CUdeviceptr>(address), bytes)) return true;
    fprintf(stderr, "emulated cuBLASLt: matrix %s at %p is not inside one allocation\n", name, address);
    return false;
}
}  // namespace

bool Problem::in_device_memory() const {
    bool inside = in_range("A", A, a) && in_range("B", B, b) && in_range("D", D, d) &&
                  (!C || beta == 0 || in_range("C", C, c));
    if (has_vector()) {
        Layout vector;
        vector.type = vector_format() == Format::f32 ? R_32F : R_16BF;
        vector.rows = vector_length(), vector.columns = 1;
        vector.batch = d.batch, vector.stride = what.bias_stride;
        inside = inside && in_range("bias", what.bias, vector);
    }
    if (has(AUX) && !has_mask()) {
        Layout aux = d;
        aux.ld = what.aux_ld, aux.stride = what.aux_stride;
        aux.type = aux_format() == Format::f32 ? R_32F : R_16BF;
        inside = inside && in_range("aux", what.aux, aux);
    } else if (has(AUX)) {
        Layout words;  // as f32: 32 elements of the mask each
        words.rows = what.aux_ld / 32, words.columns = n(), words.ld = what.aux_ld / 32;
        words.batch = d.batch, words.stride = what.aux_stride / 32;
        inside = inside && in_range("aux", what.aux, words);
    }
    return inside;
}

namespace {
constexpr double gelu_slope = 0.7978845608028654, gelu_cubic = 0.044715;  // sqrt(2 / pi)
double gelu(double x) { return 0.5 * x * (1 + std::tanh(gelu_slope * (x + gelu_cubic * x * x * x))); }
double gelu_derivative(double x) {
    double t = std::tanh(gelu_slope * (x + gelu_cubic * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * gelu_slope * (1 + 3 * gelu_cubic * x * x);
}

void* element(const void* base, Format format, int64_t index) {
    auto* bytes = static_cast<uint8_t*>(const_cast<void*>(base));
    return bytes + index * static_cast<int64_t>(gemm::size_of(format));
}
}  // namespace

void Problem::run() const {
    float alpha = device_alpha ? *device_alpha : this->alpha;
    float beta = device_beta ? *device_beta : this->beta;
    for (int batch = 0; batch < d.batch; ++batch) run_one(batch, alpha, beta);
}

void Problem::run_one(int batch, float alpha, float beta) const {
    Format ad = format_of(a.type), bd = format_of(b.type), cd = format_of(c.type);
    Format dd = format_of(d.type), vd = vector_format(), xd = aux_format();
    gemm::Operand left{element(A, ad, batch * a.stride), ad, static_cast<size_t>(a.ld), what.transa != 0};
    gemm::Operand right{element(B, bd, batch * b.stride), bd, static_cast<size_t>(b.ld), what.transb != 0};
    const void* source = beta != 0 ? element(C, cd, batch * c.stride) : nullptr;
    void* target = element(D, dd, batch * d.stride);
    void* vector = has_vector() ? element(what.bias, vd, batch * what.bias_stride) : nullptr;
    auto* mask = has_mask() ? static_cast<uint8_t*>(what.aux) + batch * what.aux_stride / 8 : nullptr;
    void* aux = has(AUX) && !mask ? element(what.aux, xd, batch * what.aux_stride) : nullptr;

    gemm::Rounding rounding = what.compute == FAST_TF32   ? gemm::Rounding::tf32
                              : what.compute == FAST_16BF ? gemm::Rounding::bf16
                                                          : gemm::Rounding::none;
    std::vector<float> product = gemm::multiply(m(), n(), k(), left, right, rounding);
    std::vector<double> vector_sums(has(BGRAD) ? m() : 0);
    for (size_t j = 0; j < n(); ++j)
        for (size_t i = 0; i < m(); ++i) {
            float value = alpha * product[j * m() + i];
            if (source) value += beta * gemm::load(source, cd, j * c.ld + i);
            if (has(BIAS)) value += gemm::load(vector, vd, i);
            size_t place = j * what.aux_ld + i;
            if (has(RELU)) {
                bool kept = value > 0;  // what is not a number becomes 0, as in the real library
                if (mask) {
                    uint8_t bit = static_cast<uint8_t>(1u << (place % 8));
                    uint8_t others = static_cast<uint8_t>(mask[place / 8] & ~bit);
                    mask[place / 8] = static_cast<uint8_t>(kept ? others | bit : others);
                }
                if (!kept) value = 0;
            }
            if (has(DRELU) && !(mask[place / 8] >> (place % 8) & 1)) value = 0;
            if (has(GELU)) {
                if (aux) gemm::store(aux, xd, place, value);
                value = static_cast<float>(gelu(value));
            }
            if (has(DGELU))
                value = static_cast<float>(value * gelu_derivative(gemm::load(aux, xd, place)));
            if (has(BGRAD)) vector_sums[i] += value;
            gemm::store(target, dd, j * d.ld + i, value);
        }
    for (size_t i = 0; i < vector_sums.size(); ++i)
        gemm::store(vector, vd, i, static_cast<float>(vector_sums[i]));
    if (!has(BGRADA | BGRADB)) return;
    for (size_t i = 0; i < vector_length(); ++i) {
        double sum = 0;
        for (size_t l = 0; l < k(); ++l) sum += has(BGRADA) ? left.at(i, l) : right.at(l, i);
        gemm::store(vector, vd, i, static_cast<float>(sum));
    }
}
}  // namespace cublaslt
