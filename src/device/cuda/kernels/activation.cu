// Activations with bias, their derivatives, and sums over rows.

// Numbers of `Activation`.
enum { IDENTITY = 0, RELU = 1, GELU = 2, TANH = 3 };

// x · Φ(x) and its derivative, exact.
__device__ __forceinline__ float gelu(float x, float* derivative) {
    float distribution = 0.5f + 0.5f * erff(x * 0.70710678f);
    *derivative = distribution + x * 0.39894228f * expf(-0.5f * x * x);
    return x * distribution;
}

// GELU saves its derivative for the backward pass, or in bf16 its argument, as cuBLASLt does.
__device__ __forceinline__ void save_gelu(float* saved, float, float derivative) {
    *saved = derivative;
}

__device__ __forceinline__ void save_gelu(bf16* saved, float x, float) {
    *saved = from_float<bf16>(x);
}

__device__ __forceinline__ float gelu_derivative(float saved) {
    return saved;
}

__device__ __forceinline__ float gelu_derivative(bf16 saved) {
    float derivative;
    gelu(to_float(saved), &derivative);
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
    if (activation == GELU) {
        float derivative;
        float y = gelu(x, &derivative);
        save_gelu(saved, x, derivative);
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
    return activation == GELU ? gradient * gelu_derivative(saved) : gradient;
}

// output = activation(input + bias), rows of `columns`; `bias` may be null, `output` may be
// `input`.
template <class T>
__device__ __forceinline__ void bias_activation_forward(
    int activation, uint64 len, uint32 columns, const T* input, const float* bias, T* saved, T* output) {
    uint64 fours = len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> x = ((const Four<T>*)input)[four], save;
        uint32 column = bias ? (uint32)(four * 4 % columns) : 0;
        for (int i = 0; i < 4; i++) {
            float sum = to_float(x.at[i]);
            if (bias) {
                sum += bias[column];
                column = column + 1 == columns ? 0 : column + 1;
            }
            x.at[i] = from_float<T>(activate(activation, sum, &save.at[i]));
        }
        if (activation == GELU) {
            ((Four<T>*)saved)[four] = save;
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

// Computes activation_backward and sums over rows: row `blockIdx.y` of `sums` becomes the sum of
// the rows that the blocks with that `blockIdx.y` have, added to what is there if `accumulate`. A
// block of 256 threads has 32 columns, or all if there are fewer, and as many rows at a time as
// fit.
template <class T>
__device__ __forceinline__ void activation_backward_bias(
    int activation, uint32 rows, uint32 columns, const T* __restrict__ saved, T* __restrict__ gradient,
    float* sums, int accumulate) {
    __shared__ float tile[256];
    uint32 first = blockIdx.x * 32, width = min(32u, columns - first), height = 256 / width;
    uint32 column = threadIdx.x % width, start = threadIdx.x / width;
    uint32 block_rows = (rows + gridDim.y - 1) / gridDim.y;
    uint32 end = min(rows, (blockIdx.y + 1) * block_rows);
    float sum = 0;
    if (start < height) {
#pragma unroll 4
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
    tile[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x < width) {
        float total = 0;
        for (uint32 row = 0; row < height; row++) {
            total += tile[row * width + threadIdx.x];
        }
        float* place = &sums[(uint64)blockIdx.y * columns + first + threadIdx.x];
        *place = accumulate ? *place + total : total;
    }
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
        int accumulate) {                                                                                    \
        activation_backward_bias<T>(activation, rows, columns, saved, gradient, sums, accumulate);           \
    }

FOR_BOTH(ACTIVATIONS)
