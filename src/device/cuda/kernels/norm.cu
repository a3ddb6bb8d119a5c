// Normalisations, a warp for each vector. The statistics of a vector are computed again where they are
// needed, because saved values are activations, which bf16 would round.

// Computes the mean of a vector and 1/σ.
template <class T>
__device__ __forceinline__ void statistics(
    uint32 columns, float epsilon, const T* x, float* mean, float* scale) {
    uint32 lane = threadIdx.x % 32;
    float sum = 0;
    for (uint32 column = lane; column < columns; column += 32) {
        sum += to_float(x[column]);
    }
    *mean = warp_sum(sum) / columns;
    float squares = 0;
    for (uint32 column = lane; column < columns; column += 32) {
        float difference = to_float(x[column]) - *mean;
        squares += difference * difference;
    }
    *scale = 1.0f / sqrtf(warp_sum(squares) / columns + epsilon);
}

// output = x̂ · weight + bias; `bias` may be null.
template <class T>
__device__ __forceinline__ void layer_norm_forward(
    uint32 rows, uint32 columns, float epsilon, const T* input, const float* weight, const float* bias,
    T* output) {
    uint32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32 row = blockIdx.x * warps + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const T* x = input + (uint64)row * columns;
    T* y = output + (uint64)row * columns;
    float mean, scale;
    statistics(columns, epsilon, x, &mean, &scale);
    for (uint32 column = lane; column < columns; column += 32) {
        float normalised = (to_float(x[column]) - mean) * scale;
        y[column] = from_float<T>(normalised * weight[column] + (bias ? bias[column] : 0));
    }
}

// The gradient of the inputs, with g = weight · gradient: (g − mean(g) − x̂ · mean(g · x̂)) / σ.
template <class T>
__device__ __forceinline__ void layer_norm_backward_input(
    uint32 rows, uint32 columns, float epsilon, const T* input, const float* weight, const T* gradient,
    T* input_gradient) {
    uint32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32 row = blockIdx.x * warps + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const T* x = input + (uint64)row * columns;
    const T* dy = gradient + (uint64)row * columns;
    T* dx = input_gradient + (uint64)row * columns;
    float mean, scale;
    statistics(columns, epsilon, x, &mean, &scale);
    float sum = 0, products = 0;
    for (uint32 column = lane; column < columns; column += 32) {
        float g = to_float(dy[column]) * weight[column];
        sum += g;
        products += g * ((to_float(x[column]) - mean) * scale);
    }
    float mean_g = warp_sum(sum) / columns, mean_product = warp_sum(products) / columns;
    for (uint32 column = lane; column < columns; column += 32) {
        float g = to_float(dy[column]) * weight[column];
        float normalised = (to_float(x[column]) - mean) * scale;
        dx[column] = from_float<T>((g - mean_g - normalised * mean_product) * scale);
    }
}

// Row `blockIdx.x` of `sums` becomes the sum of gradient · x̂ over the vectors of the blocks with that
// `blockIdx.x`, added to what is there if `accumulate`. A block has up to `width` columns, with as many
// floats of shared memory for each of its warps.
template <class T>
__device__ __forceinline__ void layer_norm_backward_weight(
    uint32 rows, uint32 columns, uint32 width, float epsilon, const T* input, const T* gradient,
    float* sums, int accumulate) {
    extern __shared__ float shared[];
    uint32 lane = threadIdx.x % 32, warps = blockDim.x / 32, warp = threadIdx.x / 32;
    uint32 first = blockIdx.y * width, own_columns = min(width, columns - first);
    float* own = shared + warp * width;
    for (uint32 column = lane; column < own_columns; column += 32) {
        own[column] = 0;
    }
    uint32 block_rows = (rows + gridDim.x - 1) / gridDim.x;
    uint32 end = min(rows, (blockIdx.x + 1) * block_rows);
    for (uint32 row = blockIdx.x * block_rows + warp; row < end; row += warps) {
        const T* x = input + (uint64)row * columns;
        const T* dy = gradient + (uint64)row * columns + first;
        float mean, scale;
        statistics(columns, epsilon, x, &mean, &scale);
        for (uint32 column = lane; column < own_columns; column += 32) {
            own[column] += to_float(dy[column]) * ((to_float(x[first + column]) - mean) * scale);
        }
    }
    __syncthreads();
    for (uint32 column = threadIdx.x; column < own_columns; column += blockDim.x) {
        float total = 0;
        for (uint32 at = 0; at < warps; at++) {
            total += shared[at * width + column];
        }
        float* place = &sums[(uint64)blockIdx.x * columns + first + column];
        *place = accumulate ? *place + total : total;
    }
}

#define NORMS(T, name)                                                                                       \
    extern "C" __global__ void layer_norm_forward_##name(                                                    \
        uint32 rows, uint32 columns, float epsilon, const T* input, const float* weight, const float* bias,  \
        T* output) {                                                                                         \
        layer_norm_forward<T>(rows, columns, epsilon, input, weight, bias, output);                          \
    }                                                                                                        \
    extern "C" __global__ void layer_norm_backward_input_##name(                                             \
        uint32 rows, uint32 columns, float epsilon, const T* input, const float* weight, const T* gradient,  \
        T* input_gradient) {                                                                                 \
        layer_norm_backward_input<T>(rows, columns, epsilon, input, weight, gradient, input_gradient);       \
    }                                                                                                        \
    extern "C" __global__ void layer_norm_backward_weight_##name(                                            \
        uint32 rows, uint32 columns, uint32 width, float epsilon, const T* input, const T* gradient,         \
        float* sums, int accumulate) {                                                                       \
        layer_norm_backward_weight<T>(rows, columns, width, epsilon, input, gradient, sums, accumulate);     \
    }

FOR_BOTH(NORMS)
