// The multiplication behind cublasLtMatmul: blocks of both matrices are packed as f64, in which products
// of f32 are exact and sums of thousands of them are as good as exact. So results do not depend on the
// processor: what the compiler makes of the loop (wider vectors on newer processors) changes no sum.
#include "gemm.h"

#include <algorithm>

#if defined(__x86_64__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("default", "avx2")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace gemm {
namespace {
constexpr size_t tile_rows = 8, tile_columns = 4;              // what is kept in registers
constexpr size_t block_rows = 64, block_columns = 64, block_depth = 256;  // what is kept in caches

typedef double Half __attribute__((vector_size(32)));  // half a column of the tile

// tile += panel of a (depth x 8) times panel of b (depth x 4); the tile's columns are `ld` apart.
FOR_EACH_PROCESSOR
void multiply_tile(size_t depth, const double* a, const double* b, double* tile, size_t ld) {
    Half sum[tile_columns][2] = {};
    for (size_t step = 0; step < depth; ++step) {
        Half upper, lower;
        memcpy(&upper, a + step * tile_rows, sizeof upper);
        memcpy(&lower, a + step * tile_rows + 4, sizeof lower);
        for (size_t column = 0; column < tile_columns; ++column) {
            double factor = b[step * tile_columns + column];
            sum[column][0] += upper * factor;
            sum[column][1] += lower * factor;
        }
    }
    for (size_t column = 0; column < tile_columns; ++column)
        for (size_t row = 0; row < tile_rows; ++row)
            tile[column * ld + row] += sum[column][row / 4][row % 4];
}

float rounded(float value, Rounding rounding) {
    switch (rounding) {
        case Rounding::tf32: return to_tf32(value);
        case Rounding::bf16: return from_bf16(to_bf16(value));
        default: return value;
    }
}

// `count` vectors of the operand (rows of a, columns of b) in panels of `width`, padded with zeros.
void pack(double* to, size_t width, size_t count, size_t depth, Rounding rounding, const Operand& from,
          bool columns, size_t first, size_t first_depth) {
    for (size_t panel = 0; panel < count; panel += width, to += width * depth)
        for (size_t lane = 0; lane < width; ++lane)
            for (size_t step = 0; step < depth; ++step) {
                size_t i = first + panel + lane, j = first_depth + step;
                bool inside = panel + lane < count;
                float value = !inside ? 0.0f : columns ? from.at(j, i) : from.at(i, j);
                to[step * width + lane] = rounded(value, rounding);
            }
}
}  // namespace

std::vector<float> multiply(size_t m, size_t n, size_t k, const Operand& a, const Operand& b,
                            Rounding rounding) {
    std::vector<float> product(m * n);
    size_t ld = (m + tile_rows - 1) / tile_rows * tile_rows;
    std::vector<double> sums(ld * block_columns);
    std::vector<double> packed_a(block_rows * block_depth), packed_b(block_columns * block_depth);
    for (size_t j = 0; j < n; j += block_columns) {
        size_t columns = std::min(block_columns, n - j);
        std::fill(sums.begin(), sums.end(), 0.0);
        for (size_t l = 0; l < k; l += block_depth) {
            size_t depth = std::min(block_depth, k - l);
            pack(packed_b.data(), tile_columns, columns, depth, rounding, b, true, j, l);
            for (size_t i = 0; i < m; i += block_rows) {
                size_t rows = std::min(block_rows, m - i);
                pack(packed_a.data(), tile_rows, rows, depth, rounding, a, false, i, l);
                for (size_t jj = 0; jj < columns; jj += tile_columns)
                    for (size_t ii = 0; ii < rows; ii += tile_rows)
                        multiply_tile(depth, &packed_a[ii * depth], &packed_b[jj * depth],
                                      &sums[jj * ld + i + ii], ld);
            }
        }
        for (size_t jj = 0; jj < columns; ++jj)
            for (size_t i = 0; i < m; ++i) product[(j + jj) * m + i] = static_cast<float>(sums[jj * ld + i]);
    }
    return product;
}
}  // namespace gemm
