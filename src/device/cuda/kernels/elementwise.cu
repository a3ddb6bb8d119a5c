// Filling, casting, moving blocks, activations and their derivatives, sums over rows.

// Numbers of `Activation`.
enum { IDENTITY = 0, RELU = 1, GELU = 2, TANH = 3 };

// x · Φ(x) and its derivative, exact.
__device__ __forceinline__ float gelu(float x, float* derivative) {
    float distribution = 0.5f + 0.5f * erff(x * 0.70710678f);
    *derivative = distribution + x * 0.39894228f * expf(-0.5f * x * x);
    return x * distribution;
}

// What GELU saves for the backward pass: its derivative, or in bf16 its argument, as cuBLASLt does.
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

// `reference` is what the forward pass saved, or else its output.
template <class T>
__device__ __forceinline__ float unactivate(int activation, float gradient, T reference) {
    if (activation == RELU) {
        return to_float(reference) > 0 ? gradient : 0;
    }
    if (activation == TANH) {
        float y = to_float(reference);
        return gradient * (1 - y * y);
    }
    return activation == GELU ? gradient * gelu_derivative(reference) : gradient;
}

// output = activation(input + bias), rows of `columns`; `bias` may be null, `output` may be `input`.
template <class T>
__device__ __forceinline__ void bias_activation(
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

// gradient = activation'(reference) · gradient, in place.
template <class T>
__device__ __forceinline__ void unactivate_all(int activation, uint64 len, const T* reference, T* gradient) {
    uint64 fours = len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> g = ((Four<T>*)gradient)[four], r = ((const Four<T>*)reference)[four];
        for (int i = 0; i < 4; i++) {
            g.at[i] = from_float<T>(unactivate(activation, to_float(g.at[i]), r.at[i]));
        }
        ((Four<T>*)gradient)[four] = g;
    }
    uint64 at = fours * 4 + thread_index();
    if (at < len) {
        gradient[at] = from_float<T>(unactivate(activation, to_float(gradient[at]), reference[at]));
    }
}

// The same, and the sums over rows: those of the rows that `blockIdx.y` has go to row `blockIdx.y` of `sums`, added to what is there
// if `accumulate`. A block of 256 threads has 32 columns, or all if there are fewer, and as many rows at a time as fit.
template <class T>
__device__ __forceinline__ void unactivate_and_sum(
    int activation, uint32 rows, uint32 columns, const T* __restrict__ reference, T* __restrict__ gradient, float* sums,
    int accumulate) {
    __shared__ float tile[256];
    uint32 first = blockIdx.x * 32, width = min(32u, columns - first), height = 256 / width;
    uint32 column = threadIdx.x % width, start = threadIdx.x / width;
    uint32 share = (rows + gridDim.y - 1) / gridDim.y;
    uint32 end = min(rows, (blockIdx.y + 1) * share);
    float sum = 0;
    if (start < height) {
#pragma unroll 4
        for (uint32 row = blockIdx.y * share + start; row < end; row += height) {
            uint64 at = (uint64)row * columns + first + column;
            float g = to_float(gradient[at]);
            if (activation != IDENTITY) {
                g = unactivate(activation, g, reference[at]);
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

template <class T>
__device__ __forceinline__ void copy_rows(
    uint32 rows, uint32 columns, uint32 from_stride, uint32 into_stride, const T* from, T* into) {
    for (uint64 at = thread_index(); at < (uint64)rows * columns; at += num_threads()) {
        uint64 row = at / columns, column = at % columns;
        into[row * into_stride + column] = from[row * from_stride + column];
    }
}

template <class T>
__device__ __forceinline__ void transpose_matrices(
    uint64 len, uint32 rows, uint32 columns, const T* input, T* output) {
    uint32 size = rows * columns;
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint64 matrix = at / size;
        uint32 place = (uint32)(at % size);
        output[at] = input[matrix * size + place % rows * columns + place / rows];
    }
}

// Row i of `into` becomes the row of `table` whose number is the bits of `numbers[i]`.
template <class T>
__device__ __forceinline__ void gather(
    uint64 len, uint32 columns, const float* table, const float* numbers, T* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint64 row = __float_as_uint(numbers[at / columns]);
        into[at] = from_float<T>(table[row * columns + at % columns]);
    }
}

// The sum of `mine`, the term of number `own`, and of `terms` others that are `stride` apart.
template <class T>
__device__ __forceinline__ float sum_terms(float mine, const T* others, uint64 stride, uint32 terms, uint32 own) {
    float sum = own == 0 ? mine : to_float(others[0]);
    for (uint32 term = 1; term <= terms; term++) {
        uint64 slot = term < own ? term : term - 1;
        sum += term == own ? mine : to_float(others[slot * stride]);
    }
    return sum;
}

// values[i] becomes its sum with what arrived, inbox[term][i].
template <class T>
__device__ __forceinline__ void add_terms(
    uint64 len, T* values, const T* inbox, uint64 stride, uint32 terms, uint32 own) {
    bool is_aligned = ((uint64)values | (uint64)inbox) % sizeof(Four<T>) == 0;
    uint64 fours = terms == 1 && is_aligned ? len / 4 : 0;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> mine = ((Four<T>*)values)[four], other = ((const Four<T>*)inbox)[four];
        for (int lane = 0; lane < 4; lane++) {
            mine.at[lane] = from_float<T>(to_float(mine.at[lane]) + to_float(other.at[lane]));
        }
        ((Four<T>*)values)[four] = mine;
    }
    for (uint64 at = 4 * fours + thread_index(); at < len; at += num_threads()) {
        values[at] = from_float<T>(sum_terms<T>(to_float(values[at]), inbox + at, stride, terms, own));
    }
}

#define ELEMENTWISE(T, name)                                                                                        \
    extern "C" __global__ void bias_activation_##name(                                                              \
        int activation, uint64 len, uint32 columns, const T* input, const float* bias, T* saved, T* output) {       \
        bias_activation<T>(activation, len, columns, input, bias, saved, output);                                   \
    }                                                                                                               \
    extern "C" __global__ void unactivate_##name(int activation, uint64 len, const T* reference, T* gradient) {     \
        unactivate_all<T>(activation, len, reference, gradient);                                                    \
    }                                                                                                               \
    extern "C" __global__ void unactivate_sum_##name(                                                               \
        int activation, uint32 rows, uint32 columns, const T* reference, T* gradient, float* sums, int accumulate) {\
        unactivate_and_sum<T>(activation, rows, columns, reference, gradient, sums, accumulate);                    \
    }                                                                                                               \
    extern "C" __global__ void copy_block_##name(                                                                   \
        uint32 rows, uint32 columns, uint32 from_stride, uint32 into_stride, const T* from, T* into) {              \
        copy_rows<T>(rows, columns, from_stride, into_stride, from, into);                                          \
    }                                                                                                               \
    extern "C" __global__ void transpose_each_##name(                                                               \
        uint64 len, uint32 rows, uint32 columns, const T* input, T* output) {                                       \
        transpose_matrices<T>(len, rows, columns, input, output);                                                   \
    }                                                                                                               \
    extern "C" __global__ void gather_rows_##name(                                                                  \
        uint64 len, uint32 columns, const float* table, const float* numbers, T* into) {                            \
        gather<T>(len, columns, table, numbers, into);                                                              \
    }                                                                                                               \
    extern "C" __global__ void add_terms_##name(                                                                     \
        uint64 len, T* values, const T* inbox, uint64 stride, uint32 terms, uint32 own) {                           \
        add_terms<T>(len, values, inbox, stride, terms, own);                                                       \
    }                                                                                                               \
    extern "C" __global__ void fill_##name(uint64 len, float value, T* into) {                                      \
        for (uint64 at = thread_index(); at < len; at += num_threads()) {                                           \
            into[at] = from_float<T>(value);                                                                        \
        }                                                                                                           \
    }

FOR_BOTH(ELEMENTWISE)

extern "C" __global__ void cast_to_bf16(uint64 len, const float* from, bf16* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        into[at] = from_float<bf16>(from[at]);
    }
}

extern "C" __global__ void cast_to_f32(uint64 len, const bf16* from, float* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        into[at] = to_float(from[at]);
    }
}

// total[i] (+)= Σ parts[part][i]. Blocks are 32 elements wide and 8 parts high.
extern "C" __global__ void sum_parts(uint32 num_parts, uint32 len, const float* parts, float* total, int accumulate) {
    __shared__ float tile[8][33];
    uint32 at = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (at < len) {
        for (uint32 part = threadIdx.y; part < num_parts; part += 8) {
            sum += parts[(uint64)part * len + at];
        }
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && at < len) {
        float all = accumulate ? total[at] : 0;
        for (int row = 0; row < 8; row++) {
            all += tile[row][threadIdx.x];
        }
        total[at] = all;
    }
}

// Values that come as arguments.
struct Few {
    float at[16];
};

struct Some {
    float at[960];
};

extern "C" __global__ void store_few(Few values, uint32 len, float* into) {
    if (threadIdx.x < len) {
        into[threadIdx.x] = values.at[threadIdx.x];
    }
}

extern "C" __global__ void store_some(const __grid_constant__ Some values, uint32 len, float* into) {
    if (thread_index() < len) {
        into[thread_index()] = values.at[thread_index()];
    }
}
