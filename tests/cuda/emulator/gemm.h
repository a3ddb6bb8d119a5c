// Number formats and the multiplication behind cublasLtMatmul.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace gemm {
enum class Format { f32, bf16 };
enum class Rounding { none, tf32, bf16 };  // of the inputs, before they are multiplied

inline size_t size_of(Format format) { return format == Format::f32 ? 4 : 2; }

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// To the nearest, ties to even.
inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

// Ten bits of mantissa; to the nearest, ties away from zero.
inline float to_tf32(float value) {
    if (!std::isfinite(value)) return value;
    return float_of((bits_of(value) + 0x1000) & ~0x1fffu);
}

inline float load(const void* data, Format format, size_t index) {
    if (format == Format::f32) return static_cast<const float*>(data)[index];
    return from_bf16(static_cast<const uint16_t*>(data)[index]);
}
inline void store(void* data, Format format, size_t index, float value) {
    if (format == Format::f32) static_cast<float*>(data)[index] = value;
    else static_cast<uint16_t*>(data)[index] = to_bf16(value);
}

// Column-major; element (i, j) of what is multiplied is at [j, i] if transposed.
struct Operand {
    const void* data;
    Format format;
    size_t ld;
    bool transposed;

    float at(size_t i, size_t j) const {
        return load(data, format, transposed ? j + i * ld : i + j * ld);
    }
};

// a (m x k) times b (k x n), column-major and packed, summed in f64 and rounded once to f32.
std::vector<float> multiply(size_t m, size_t n, size_t k, const Operand& a, const Operand& b, Rounding rounding);
}  // namespace gemm
