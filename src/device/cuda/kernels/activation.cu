// Activations with bias, their derivatives, and sums over rows.

#include "dropout.cuh"

// Numbers of `Activation`.
enum { IDENTITY = 0, RELU = 1, GELU = 2, TANH = 3, GELU_TANH = 4, SILU = 5 };

// Numbers of `Gate`.
enum { SIGMOID_GATE = 0, SILU_GATE = 1, GELU_GATE = 2 };

// x · Φ(x) and its derivative, exact.
__device__ __forceinline__ float gelu(float x, float* derivative) {
    float distribution = 0.5f + 0.5f * erff(x * 0.70710678f);
    *derivative = distribution + x * 0.39894228f * expf(-0.5f * x * x);
    return x * distribution;
}

// GELU with tanh in place of erf, and its derivative.
__device__ __forceinline__ float gelu_tanh(float x, float* derivative) {
    float square = x * x, t = tanhf(0.79788456f * x * (1 + 0.044715f * square)), half = 0.5f + 0.5f * t;
    *derivative = half + 0.5f * x * (1 - t * t) * 0.79788456f * (1 + 3 * 0.044715f * square);
    return x * half;
}

// The logistic function and its derivative.
__device__ __forceinline__ float sigmoid(float x, float* derivative) {
    float value = 1 / (1 + expf(-x));
    *derivative = value * (1 - value);
    return value;
}

// x · σ(x) and its derivative.
__device__ __forceinline__ float silu(float x, float* derivative) {
    float slope, value = sigmoid(x, &slope);
    *derivative = value + x * slope;
    return x * value;
}

// Returns true for activations that save their derivative for the backward pass, or in bf16 their
// argument, as cuBLASLt does.
__device__ __forceinline__ bool saves(int activation) {
    return activation == GELU || activation == GELU_TANH || activation == SILU;
}

// GELU of values in format `T`: in bf16 with tanh, as in cuBLASLt's epilogues, so that it is one function in
// all layers. It differs from the exact one by less than 0.0005.
template <class T>
__device__ __forceinline__ float gelu_of(float x, float* derivative) {
    return sizeof(T) == 2 ? gelu_tanh(x, derivative) : gelu(x, derivative);
}

// Computes an activation that saves.
template <class T>
__device__ __forceinline__ float smooth(int activation, float x, float* derivative) {
    return activation == GELU ? gelu_of<T>(x, derivative)
        : activation == SILU  ? silu(x, derivative)
                              : gelu_tanh(x, derivative);
}

__device__ __forceinline__ void save(float* saved, float, float derivative) {
    *saved = derivative;
}

__device__ __forceinline__ void save(bf16* saved, float x, float) {
    *saved = from_float<bf16>(x);
}

__device__ __forceinline__ float saved_derivative(int, float saved) {
    return saved;
}

__device__ __forceinline__ float saved_derivative(int activation, bf16 saved) {
    float derivative;
    smooth<bf16>(activation, to_float(saved), &derivative);
    return derivative;
}

template <class T>
__device__ __forceinline__ float activate(int activation, float x, T* saved) {
    if (activation == RELU) {
        return x > 0 || x != x ? x : 0;
    }
    if (activation == TANH) {
        return tanhf(x);
    }
    if (saves(activation)) {
        float derivative;
        float y = smooth<T>(activation, x, &derivative);
        save(saved, x, derivative);
        return y;
    }
    return x;
}

// Returns the gradient of the argument. `saved` is the value that the forward pass saved, or its
// output.
template <class T>
__device__ __forceinline__ float derive(int activation, float gradient, T saved) {
    if (activation == RELU) {
        return to_float(saved) > 0 ? gradient : 0;
    }
    if (activation == TANH) {
        float y = to_float(saved);
        return gradient * (1 - y * y);
    }
    return saves(activation) ? gradient * saved_derivative(activation, saved) : gradient;
}

// output = activation(input + bias), rows of `columns`; `bias` may be null, `output` may be
// `input`.
template <class T>
__device__ __forceinline__ void bias_activation_forward(
    int activation, uint64 len, uint32 columns, const T* input, const float* bias, T* saved, T* output) {
    uint64 fours = len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> x = ((const Four<T>*)input)[four], values;
        uint32 column = bias ? (uint32)(four * 4 % columns) : 0;
        for (int i = 0; i < 4; i++) {
            float sum = to_float(x.at[i]);
            if (bias) {
                sum += bias[column];
                column = column + 1 == columns ? 0 : column + 1;
            }
            x.at[i] = from_float<T>(activate(activation, sum, &values.at[i]));
        }
        if (saves(activation)) {
            ((Four<T>*)saved)[four] = values;
        }
        ((Four<T>*)output)[four] = x;
    }
    uint64 at = fours * 4 + thread_index();
    if (at < len) {
        float sum = to_float(input[at]) + (bias ? bias[at % columns] : 0);
        output[at] = from_float<T>(activate(activation, sum, &saved[at]));
    }
}

// gradient = activation'(saved) · gradient, in place.
template <class T>
__device__ __forceinline__ void activation_backward(int activation, uint64 len, const T* saved, T* gradient) {
    uint64 fours = len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> g = ((Four<T>*)gradient)[four], s = ((const Four<T>*)saved)[four];
        for (int i = 0; i < 4; i++) {
            g.at[i] = from_float<T>(derive(activation, to_float(g.at[i]), s.at[i]));
        }
        ((Four<T>*)gradient)[four] = g;
    }
    uint64 at = fours * 4 + thread_index();
    if (at < len) {
        gradient[at] = from_float<T>(derive(activation, to_float(gradient[at]), saved[at]));
    }
}

// Stores the sums over the rows of a tile of 256 threads with `width` columns, of which thread i has
// `value` i, added to what is there if `accumulate`.
__device__ __forceinline__ void sum_tile(uint32 width, float value, float* total, int accumulate) {
    __shared__ float tile[256];
    __syncthreads();
    tile[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x < width) {
        float sum = 0;
        for (uint32 row = 0; row < 256 / width; row++) {
            sum += tile[row * width + threadIdx.x];
        }
        total[threadIdx.x] = accumulate ? total[threadIdx.x] + sum : sum;
    }
}

// Computes activation_backward and sums over rows: row `blockIdx.y` of `sums` becomes the sum of
// the rows that the blocks with that `blockIdx.y` have, added to what is there if `accumulate`. A
// block of 256 threads has 32 columns, or all if there are fewer, and as many rows at a time as
// fit. If there is a `total`, the last block of the same columns adds up the rows of `sums` there instead;
// `blocks_done` has a counter for each `blockIdx.x`, 0 before and after.
template <class T>
__device__ __forceinline__ void activation_backward_bias(
    int activation, uint32 rows, uint32 columns, const T* __restrict__ saved, T* __restrict__ gradient,
    float* sums, int accumulate, float* total, uint32* blocks_done) {
    uint32 first = blockIdx.x * 32, width = min(32u, columns - first), height = 256 / width;
    uint32 column = threadIdx.x % width, start = threadIdx.x / width;
    uint32 block_rows = (rows + gridDim.y - 1) / gridDim.y;
    uint32 end = min(rows, (blockIdx.y + 1) * block_rows);
    float sum = 0;
    if (start < height) {
#pragma unroll 8
        for (uint32 row = blockIdx.y * block_rows + start; row < end; row += height) {
            uint64 at = (uint64)row * columns + first + column;
            float g = to_float(gradient[at]);
            if (activation != IDENTITY) {
                g = derive(activation, g, saved[at]);
                gradient[at] = from_float<T>(g);
            }
            sum += g;
        }
    }
    sum_tile(width, sum, &sums[(uint64)blockIdx.y * columns + first], accumulate && !total);
    if (total && is_last_block(&blocks_done[blockIdx.x], gridDim.y)) {
        sum = 0;
        for (uint32 row = start; row < gridDim.y && start < height; row += height) {
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
