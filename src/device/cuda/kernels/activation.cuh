// Activations, their derivatives, and sums of gradients over rows.

// Numbers of `Activation`.
enum { IDENTITY = 0, RELU = 1, GELU = 2, TANH = 3, GELU_TANH = 4, SILU = 5 };

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

// Returns the sum of a column of the gradients before the activation, over the rows `begin`,
// `begin` + `step`, … below `end`. If `WRITES`, they replace those after the activation.
template <class T, bool WRITES>
__device__ __forceinline__ float sum_column(
    int activation, uint32 begin, uint32 end, uint32 step, uint32 columns, uint32 column,
    const T* __restrict__ saved, T* __restrict__ gradient) {
    float sum = 0;
#pragma unroll 8
    for (uint32 row = begin; row < end; row += step) {
        uint64 at = (uint64)row * columns + column;
        float g = to_float(gradient[at]);
        if (activation != IDENTITY) {
            g = derive(activation, g, saved[at]);
            if (WRITES) {
                gradient[at] = from_float<T>(g);
            }
        }
        // not contracted with the product of the derivative, so that both forms have the same bits
        sum = __fadd_rn(sum, g);
    }
    return sum;
}
