// Small products of matrices, for which cuBLASLt divides the terms among blocks and adds them in a second
// kernel, and the backward pass of a linear layer as two of them.

#include "activation.cuh"

// A factor of a product: its lines, the rows of the left factor or the columns of the right one, have a value
// for each term. Those of a gradient after an activation are turned into those before it, by `saved`.
struct Factor {
    const float* values;
    const float* saved;
    uint32 activation, line_stride, term_stride;
};

// output = left · right + bias, added to what is there if `accumulate`, then ReLU if `relu`; `output` is
// `[rows, columns]`, `bias` may be null.
struct TiledProduct {
    uint32 rows, columns, terms, accumulate, relu;
    Factor left, right;
    const float* bias;
    float* output;
};

// Terms of a sum that are in shared memory at a time.
const uint32 TERMS = 128;
// Rows and columns of a tile, which a block computes.
const uint32 SIDE = 16;

// The values of each factor that a thread copies at a time.
const uint32 EACH = SIDE * TERMS / 256;

// Reads this thread's part of `TERMS` terms from number `start` on, of 16 lines of a factor from number
// `first` on; those beyond the last are 0.
__device__ __forceinline__ void read_factor(
    float (&into)[EACH], const Factor& factor, uint32 lines, uint32 first, uint32 terms, uint32 start) {
    // neighbouring threads read neighbouring values
    bool by_terms = factor.term_stride == 1;
    auto read = [&](float(&values)[EACH], const float* from) {
#pragma unroll
        for (uint32 i = 0; i < EACH; i++) {
            uint32 at = threadIdx.x + 256 * i;
            uint32 line = first + (by_terms ? at / TERMS : at % SIDE);
            uint32 term = start + (by_terms ? at % TERMS : at / SIDE);
            uint64 place = (uint64)line * factor.line_stride + (uint64)term * factor.term_stride;
            values[i] = line < lines && term < terms ? from[place] : 0;
        }
    };
    read(into, factor.values);
    if (factor.activation != IDENTITY) {
        float saved[EACH];
        read(saved, factor.saved);
#pragma unroll
        for (uint32 i = 0; i < EACH; i++) {
            into[i] = derive((int)factor.activation, into[i], saved[i]);
        }
    }
}

// Writes what read_factor has read to shared memory.
__device__ __forceinline__ void stage_factor(
    float (&into)[SIDE][TERMS + 1], const float (&read)[EACH], const Factor& factor) {
    bool by_terms = factor.term_stride == 1;
#pragma unroll
    for (uint32 i = 0; i < EACH; i++) {
        uint32 at = threadIdx.x + 256 * i;
        into[by_terms ? at / TERMS : at % SIDE][by_terms ? at % TERMS : at / SIDE] = read[i];
    }
}

// Computes tile number `tile` of a product, by rows. A block of 256 threads has 16 × 16 values: each thread
// four of them, and a quarter of their terms.
__device__ __forceinline__ void multiply_tile(const TiledProduct& product, uint32 tile) {
    __shared__ float lefts[SIDE][TERMS + 1], rights[SIDE][TERMS + 1], parts[4][SIDE][SIDE + 1];
    uint32 rows = product.rows, columns = product.columns, terms = product.terms;
    uint32 tiles_of_row = (columns + SIDE - 1) / SIDE;
    uint32 first_row = tile / tiles_of_row * SIDE, first_column = tile % tiles_of_row * SIDE;
    uint32 quarter = threadIdx.x / 64, y = threadIdx.x % 64 / 8, x = threadIdx.x % 8;
    float sums[2][2] = {{0, 0}, {0, 0}}, left_read[EACH], right_read[EACH];
    auto read = [&](uint32 start) {
        read_factor(left_read, product.left, rows, first_row, terms, start);
        read_factor(right_read, product.right, columns, first_column, terms, start);
    };
    read(0);
    for (uint32 start = 0; start < terms; start += TERMS) {
        __syncthreads();
        stage_factor(lefts, left_read, product.left);
        stage_factor(rights, right_read, product.right);
        __syncthreads();
        // the next terms arrive while these are multiplied
        if (start + TERMS < terms) {
            read(start + TERMS);
        }
        uint32 end = min(TERMS, terms - start);
#pragma unroll 4
        for (uint32 term = quarter; term < end; term += 4) {
            float a[2] = {lefts[y][term], lefts[y + 8][term]};
            float b[2] = {rights[x][term], rights[x + 8][term]};
            for (uint32 i = 0; i < 2; i++) {
                for (uint32 j = 0; j < 2; j++) {
                    sums[i][j] += a[i] * b[j];
                }
            }
        }
    }
    for (uint32 i = 0; i < 2; i++) {
        for (uint32 j = 0; j < 2; j++) {
            parts[quarter][y + 8 * i][x + 8 * j] = sums[i][j];
        }
    }
    __syncthreads();
    uint32 row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    if (first_row + row < rows && first_column + column < columns) {
        float value = parts[0][row][column];
        for (uint32 part = 1; part < 4; part++) {
            value += parts[part][row][column];
        }
        value += product.bias ? product.bias[first_column + column] : 0;
        float* place = &product.output[(uint64)(first_row + row) * columns + first_column + column];
        value += product.accumulate ? *place : 0;
        *place = product.relu && value < 0 ? 0 : value;
    }
}

// Computes a product, a tile in each block.
extern "C" __global__ void small_product(const __grid_constant__ TiledProduct product) {
    multiply_tile(product, blockIdx.x);
}

// Computes the gradients of the inputs, of the weight and of the bias of a linear layer. The first
// `input_tiles` blocks have those of the inputs, the next `weight_tiles` those of the weight, and the rest 32
// columns each of the bias, in the order of activation_backward_bias with one row of sums.
extern "C" __global__ void linear_backward(
    const __grid_constant__ TiledProduct input, const __grid_constant__ TiledProduct weight,
    uint32 input_tiles, uint32 weight_tiles, Factor gradient, uint32 rows, uint32 outputs, float* bias,
    int accumulate) {
    if (blockIdx.x < input_tiles + weight_tiles) {
        bool is_input = blockIdx.x < input_tiles;
        multiply_tile(is_input ? input : weight, is_input ? blockIdx.x : blockIdx.x - input_tiles);
        return;
    }
    uint32 first = (blockIdx.x - input_tiles - weight_tiles) * 32, width = min(32u, outputs - first);
    uint32 height = 256 / width, column = threadIdx.x % width, start = threadIdx.x / width;
    float sum = 0;
    if (start < height) {
        sum = sum_column<float, false>(
            (int)gradient.activation, start, rows, height, outputs, first + column, gradient.saved,
            (float*)gradient.values);
    }
    sum_tile(width, sum, &bias[first], accumulate);
}
