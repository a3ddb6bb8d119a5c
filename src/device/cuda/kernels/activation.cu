// Activations with bias, their derivatives, and sums over rows.

#include "activation.cuh"
#include "dropout.cuh"

// Numbers of `Gate`.
enum { SIGMOID_GATE = 0, SILU_GATE = 1, GELU_GATE = 2 };

// output = activation(input + bias), rows of `columns`; `bias` may be null, `output` may be
// `input`.
template <class T>
__device__ __forceinline__ void bias_activation_forward(
    int activation, uint64 len, uint32 columns, const T* input, const float* bias, T* saved, T* output) {
    uint64 alignment = (uint64)input | (uint64)output | (saves(activation) ? (uint64)saved : 0);
    over_values<4>(len, alignment, [&](uint64 at, auto count) {
        Several<T, count.value> x = load<count.value>(input + at), values;
        uint32 column = bias ? (uint32)(at % columns) : 0;
        for (uint32 i = 0; i < count.value; i++) {
            float sum = to_float(x.at[i]);
            if (bias) {
                sum += bias[column];
                column = column + 1 == columns ? 0 : column + 1;
            }
            x.at[i] = from_float<T>(activate(activation, sum, &values.at[i]));
        }
        if (saves(activation)) {
            store(saved + at, values);
        }
        store(output + at, x);
    });
}

// gradient = activation'(saved) · gradient, in place.
template <class T>
__device__ __forceinline__ void activation_backward(int activation, uint64 len, const T* saved, T* gradient) {
    over_values<4>(len, (uint64)saved | (uint64)gradient, [&](uint64 at, auto count) {
        Several<T, count.value> g = load<count.value>(gradient + at), s = load<count.value>(saved + at);
        for (uint32 i = 0; i < count.value; i++) {
            g.at[i] = from_float<T>(derive(activation, to_float(g.at[i]), s.at[i]));
        }
        store(gradient + at, g);
    });
}

// Computes activation_backward and sums over rows. A block of 256 threads has a tile of 32 columns, or all
// if there are fewer, of some rows, and as many rows at a time as fit; tiles of the same rows are neighbours.
// Row r of `sums` becomes the sum of the rows that the r-th blocks of all tiles have, added to what is there
// if `accumulate`. If there is a `total`, the last block of a tile adds up the rows of `sums` there instead;
// `blocks_done` has a counter for each tile, 0 before and after.
template <class T>
__device__ __forceinline__ void activation_backward_bias(
    int activation, uint32 rows, uint32 columns, const T* saved, T* gradient, float* sums, int accumulate,
    float* total, uint32* blocks_done) {
    uint32 num_tiles = (columns + 31) / 32, num_parts = gridDim.x / num_tiles;
    uint32 tile = blockIdx.x % num_tiles, part = blockIdx.x / num_tiles;
    uint32 first = tile * 32, width = min(32u, columns - first), height = 256 / width;
    uint32 column = threadIdx.x % width, start = threadIdx.x / width;
    uint32 block_rows = (rows + num_parts - 1) / num_parts;
    uint32 end = min(rows, (part + 1) * block_rows);
    float sum = 0;
    if (start < height) {
        uint32 begin = part * block_rows + start;
        sum = sum_column<T, true>(
            activation, begin, end, height, columns, first + column, saved, gradient);
    }
    sum_tile(width, sum, &sums[(uint64)part * columns + first], accumulate && !total);
    if (total && is_last_block(&blocks_done[tile], num_parts)) {
        sum = 0;
        for (uint32 row = start; row < num_parts && start < height; row += height) {
            sum += *(volatile float*)&sums[(uint64)row * columns + first + column];
        }
        sum_tile(width, sum, &total[first], accumulate);
    }
}

template <class T>
__device__ __forceinline__ float gate_value(int gate, float x, float* derivative) {
    return gate == SIGMOID_GATE ? sigmoid(x, derivative)
        : gate == SILU_GATE     ? silu(x, derivative)
                                : gelu_of<T>(x, derivative);
}

// output = a · gate(b) of the halves a and b of rows of 2 · `columns`.
template <class T>
__device__ __forceinline__ void gated_forward(
    int gate, uint64 len, uint32 columns, const T* __restrict__ input, T* __restrict__ output) {
    over_values<4>(len, (uint64)input | (uint64)output | 4 * columns, [&](uint64 at, auto count) {
        const T* place = input + at / columns * 2 * columns + at % columns;
        Several<T, count.value> a = load<count.value>(place), b = load<count.value>(place + columns);
        for (uint32 i = 0; i < count.value; i++) {
            float derivative;
            float value = gate_value<T>(gate, to_float(b.at[i]), &derivative);
            a.at[i] = from_float<T>(to_float(a.at[i]) * value);
        }
        store(output + at, a);
    });
}

template <class T>
__device__ __forceinline__ void gated_backward(
    int gate, uint64 len, uint32 columns, const T* __restrict__ input, const T* __restrict__ gradient,
    T* __restrict__ input_gradient) {
    uint64 alignment = (uint64)input | (uint64)gradient | (uint64)input_gradient | 4 * columns;
    over_values<4>(len, alignment, [&](uint64 at, auto count) {
        uint64 first = at / columns * 2 * columns + at % columns;
        Several<T, count.value> a = load<count.value>(input + first);
        Several<T, count.value> b = load<count.value>(input + first + columns);
        Several<T, count.value> gradients = load<count.value>(gradient + at);
        for (uint32 i = 0; i < count.value; i++) {
            float derivative, g = to_float(gradients.at[i]), factor = to_float(a.at[i]);
            a.at[i] = from_float<T>(g * gate_value<T>(gate, to_float(b.at[i]), &derivative));
            b.at[i] = from_float<T>(g * factor * derivative);
        }
        store(input_gradient + first, a);
        store(input_gradient + first + columns, b);
    });
}

struct DropoutShape {
    DropoutMask mask;
    uint64 first, row_len, row_stride;
};

// Sets values to 0 and scales the others, as the draws say; `from` may be `values`.
template <class T>
__device__ __forceinline__ void dropout(DropoutShape shape, uint64 len, const T* from, T* values) {
    uint64 alignment = (uint64)from | (uint64)values | 4 * (shape.first | shape.row_len | shape.row_stride);
    over_values<4>(len, alignment, [&](uint64 at, auto count) {
        uint64 number = shape.first + at / shape.row_len * shape.row_stride + at % shape.row_len;
        Several<uint32, 4> draws = shape.mask.draw(number / 4);
        Several<T, count.value> some = load<count.value>(from + at);
        for (uint32 i = 0; i < count.value; i++) {
            // several values begin at a multiple of 4
            uint32 draw = count.value > 1 ? draws.at[i] : shape.mask.draw_one(number);
            float factor = shape.mask.factor(draw);
            some.at[i] = from_float<T>(factor > 0 ? to_float(some.at[i]) * factor : 0);
        }
        store(values + at, some);
    });
}

#define ACTIVATIONS(T, name)                                                                                 \
    extern "C" __global__ void bias_activation_forward_##name(                                               \
        int activation, uint64 len, uint32 columns, const T* input, const float* bias, T* saved,             \
        T* output) {                                                                                         \
        bias_activation_forward<T>(activation, len, columns, input, bias, saved, output);                    \
    }                                                                                                        \
    extern "C" __global__ void activation_backward_##name(                                                   \
        int activation, uint64 len, const T* saved, T* gradient) {                                           \
        activation_backward<T>(activation, len, saved, gradient);                                            \
    }                                                                                                        \
    extern "C" __global__ void activation_backward_bias_##name(                                              \
        int activation, uint32 rows, uint32 columns, const T* saved, T* gradient, float* sums,               \
        int accumulate, float* total, uint32* blocks_done) {                                                 \
        activation_backward_bias<T>(                                                                         \
            activation, rows, columns, saved, gradient, sums, accumulate, total, blocks_done);               \
    }                                                                                                        \
    extern "C" __global__ void gated_forward_##name(                                                         \
        int gate, uint64 len, uint32 columns, const T* input, T* output) {                                   \
        gated_forward<T>(gate, len, columns, input, output);                                                 \
    }                                                                                                        \
    extern "C" __global__ void gated_backward_##name(                                                        \
        int gate, uint64 len, uint32 columns, const T* input, const T* gradient, T* input_gradient) {        \
        gated_backward<T>(gate, len, columns, input, gradient, input_gradient);                              \
    }                                                                                                        \
    extern "C" __global__ void dropout_##name(                                                               \
        DropoutShape shape, uint64 len, const T* from, T* values) {                                          \
        dropout<T>(shape, len, from, values);                                                                \
    }

FOR_BOTH(ACTIVATIONS)
