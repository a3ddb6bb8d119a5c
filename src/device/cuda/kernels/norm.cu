// Normalisations, a warp for each vector, or a block for each group of channels of an image. Statistics
// are computed again where they are needed, because saved values are activations, which bf16 would round.

// Returns the product rounded: contracted with a subtraction of the mean, the gradient of a vector of one
// value would not be 0.
template <class T>
__device__ __forceinline__ float weighted(T gradient, float weight) {
    return __fmul_rn(to_float(gradient), weight);
}

// Computes the mean of a vector and 1/σ.
template <class T>
__device__ __forceinline__ void statistics(
    uint32 columns, float epsilon, int is_centred, const T* x, float* mean, float* scale) {
    uint32 lane = threadIdx.x % 32;
    float sum = 0;
    for (uint32 column = lane; column < columns; column += 32) {
        sum += to_float(x[column]);
    }
    *mean = is_centred ? warp_sum(sum) / columns : 0;
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
    uint32 rows, uint32 columns, float epsilon, int is_centred, const T* input, const float* weight,
    const float* bias, T* output) {
    uint32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32 row = blockIdx.x * warps + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const T* x = input + (uint64)row * columns;
    T* y = output + (uint64)row * columns;
    float mean, scale;
    statistics(columns, epsilon, is_centred, x, &mean, &scale);
    for (uint32 column = lane; column < columns; column += 32) {
        float normalised = (to_float(x[column]) - mean) * scale;
        y[column] = from_float<T>(normalised * weight[column] + (bias ? bias[column] : 0));
    }
}

// The gradient of the inputs, with g = weight · gradient: (g − mean(g) − x̂ · mean(g · x̂)) / σ.
template <class T>
__device__ __forceinline__ void layer_norm_backward_input(
    uint32 rows, uint32 columns, float epsilon, int is_centred, const T* input, const float* weight,
    const T* gradient, T* input_gradient) {
    uint32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32 row = blockIdx.x * warps + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const T* x = input + (uint64)row * columns;
    const T* dy = gradient + (uint64)row * columns;
    T* dx = input_gradient + (uint64)row * columns;
    float mean, scale;
    statistics(columns, epsilon, is_centred, x, &mean, &scale);
    float sum = 0, products = 0;
    for (uint32 column = lane; column < columns; column += 32) {
        float g = weighted(dy[column], weight[column]);
        sum += g;
        products += g * ((to_float(x[column]) - mean) * scale);
    }
    float mean_g = is_centred ? warp_sum(sum) / columns : 0, mean_product = warp_sum(products) / columns;
    for (uint32 column = lane; column < columns; column += 32) {
        float g = weighted(dy[column], weight[column]);
        float normalised = (to_float(x[column]) - mean) * scale;
        dx[column] = from_float<T>((g - mean_g - normalised * mean_product) * scale);
    }
}

// Row `blockIdx.x` of `sums` becomes the sum of gradient · x̂, or of gradient · x unless it `normalises`,
// over the vectors of the blocks with that `blockIdx.x`, added to what is there if `accumulate`. A block has
// up to `width` columns, with as many floats of shared memory for each of its warps.
template <class T, bool normalises>
__device__ __forceinline__ void layer_norm_backward_weight(
    uint32 rows, uint32 columns, uint32 width, float epsilon, int is_centred, const T* input,
    const T* gradient, float* sums, int accumulate) {
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
        float mean = 0, scale = 1;
        if (normalises) {
            statistics(columns, epsilon, is_centred, x, &mean, &scale);
        }
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

// output = input · weight for each vector.
template <class T>
__device__ __forceinline__ void scale_columns(
    uint64 len, uint32 columns, const T* input, const float* weight, T* output) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        output[at] = from_float<T>(to_float(input[at]) * weight[at % columns]);
    }
}

struct GroupNormShape {
    uint32 rows, positions, channels, groups;
    float epsilon;
    uint32 relu;
};

// Returns the sum over a block in all of its threads.
__device__ __forceinline__ float sum_for_all(float value) {
    __shared__ float total;
    float sum = block_sum(value);
    if (threadIdx.x == 0) {
        total = sum;
    }
    __syncthreads();
    float all = total;
    __syncthreads();
    return all;
}

// Returns the index of value `at` of a group in an image.
__device__ __forceinline__ uint32 group_index(const GroupNormShape& shape, uint32 group, uint32 at) {
    uint32 width = shape.channels / shape.groups;
    return at / width * shape.channels + group * width + at % width;
}

// Computes the mean of a group of an image and 1/σ.
template <class T>
__device__ __forceinline__ void group_statistics(
    const GroupNormShape& shape, uint32 group, const T* x, float* mean, float* scale) {
    uint32 len = shape.positions * (shape.channels / shape.groups);
    float sum = 0;
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        sum += to_float(x[group_index(shape, group, at)]);
    }
    *mean = sum_for_all(sum) / len;
    float squares = 0;
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        float difference = to_float(x[group_index(shape, group, at)]) - *mean;
        squares += difference * difference;
    }
    *scale = 1.0f / sqrtf(sum_for_all(squares) / len + shape.epsilon);
}

// Normalises group `blockIdx.y` of image `blockIdx.x` and adds `added`, which may be null; then ReLU, if the
// shape has one.
template <class T>
__device__ __forceinline__ void group_norm_forward(
    GroupNormShape shape, const T* input, const float* weight, const float* bias, const T* added,
    T* output) {
    uint64 start = (uint64)blockIdx.x * shape.positions * shape.channels;
    uint32 len = shape.positions * (shape.channels / shape.groups);
    float mean, scale;
    group_statistics(shape, blockIdx.y, input + start, &mean, &scale);
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        uint32 index = group_index(shape, blockIdx.y, at), channel = index % shape.channels;
        float normalised = (to_float(input[start + index]) - mean) * scale;
        float value = normalised * weight[channel] + bias[channel];
        value += added ? to_float(added[start + index]) : 0;
        output[start + index] = from_float<T>(shape.relu && value < 0 ? 0 : value);
    }
}

// The gradient of the inputs of group `blockIdx.y` of image `blockIdx.x`.
template <class T>
__device__ __forceinline__ void group_norm_backward_input(
    GroupNormShape shape, const T* input, const float* weight, const T* gradient, T* input_gradient) {
    uint64 start = (uint64)blockIdx.x * shape.positions * shape.channels;
    uint32 len = shape.positions * (shape.channels / shape.groups);
    float mean, scale;
    group_statistics(shape, blockIdx.y, input + start, &mean, &scale);
    float sum = 0, products = 0;
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        uint32 index = group_index(shape, blockIdx.y, at);
        float g = weighted(gradient[start + index], weight[index % shape.channels]);
        sum += g;
        products += g * ((to_float(input[start + index]) - mean) * scale);
    }
    float mean_g = sum_for_all(sum) / len, mean_product = sum_for_all(products) / len;
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        uint32 index = group_index(shape, blockIdx.y, at);
        float g = weighted(gradient[start + index], weight[index % shape.channels]);
        float normalised = (to_float(input[start + index]) - mean) * scale;
        input_gradient[start + index] = from_float<T>((g - mean_g - normalised * mean_product) * scale);
    }
}

// The sums over the positions of gradient · x̂, and of the gradient, for the channels of group `blockIdx.y`
// of image `blockIdx.x`: `sums` is `[2, images, channels]`.
template <class T>
__device__ __forceinline__ void group_norm_position_sums(
    GroupNormShape shape, const T* input, const T* gradient, float* sums) {
    uint32 width = shape.channels / shape.groups, first = blockIdx.y * width;
    float* products = sums + (uint64)blockIdx.x * shape.channels + first;
    float* totals = products + (uint64)shape.rows * shape.channels;
    const T* x = input + (uint64)blockIdx.x * shape.positions * shape.channels;
    const T* dy = gradient + (uint64)blockIdx.x * shape.positions * shape.channels;
    float mean, scale;
    group_statistics(shape, blockIdx.y, x, &mean, &scale);
    for (uint32 channel = 0; channel < width; channel++) {
        float product = 0, sum = 0;
        for (uint32 position = threadIdx.x; position < shape.positions; position += blockDim.x) {
            uint32 at = position * shape.channels + first + channel;
            float g = to_float(dy[at]);
            product += g * ((to_float(x[at]) - mean) * scale);
            sum += g;
        }
        float all_products = block_sum(product), all = block_sum(sum);
        if (threadIdx.x == 0) {
            products[channel] = all_products;
            totals[channel] = all;
        }
    }
}

#define NORMS(T, name)                                                                                       \
    extern "C" __global__ void layer_norm_forward_##name(                                                    \
        uint32 rows, uint32 columns, float epsilon, int is_centred, const T* input, const float* weight,     \
        const float* bias, T* output) {                                                                      \
        layer_norm_forward<T>(rows, columns, epsilon, is_centred, input, weight, bias, output);              \
    }                                                                                                        \
    extern "C" __global__ void layer_norm_backward_input_##name(                                             \
        uint32 rows, uint32 columns, float epsilon, int is_centred, const T* input, const float* weight,     \
        const T* gradient, T* input_gradient) {                                                              \
        layer_norm_backward_input<T>(                                                                        \
            rows, columns, epsilon, is_centred, input, weight, gradient, input_gradient);                    \
    }                                                                                                        \
    extern "C" __global__ void layer_norm_backward_weight_##name(                                            \
        uint32 rows, uint32 columns, uint32 width, float epsilon, int is_centred, const T* input,            \
        const T* gradient, float* sums, int accumulate) {                                                    \
        layer_norm_backward_weight<T, true>(                                                                 \
            rows, columns, width, epsilon, is_centred, input, gradient, sums, accumulate);                   \
    }                                                                                                        \
    extern "C" __global__ void group_norm_forward_##name(                                                    \
        GroupNormShape shape, const T* input, const float* weight, const float* bias, const T* added,        \
        T* output) {                                                                                         \
        group_norm_forward<T>(shape, input, weight, bias, added, output);                                    \
    }                                                                                                        \
    extern "C" __global__ void group_norm_backward_input_##name(                                             \
        GroupNormShape shape, const T* input, const float* weight, const T* gradient, T* input_gradient) {   \
        group_norm_backward_input<T>(shape, input, weight, gradient, input_gradient);                        \
    }                                                                                                        \
    extern "C" __global__ void group_norm_position_sums_##name(                                              \
        GroupNormShape shape, const T* input, const T* gradient, float* sums) {                              \
        group_norm_position_sums<T>(shape, input, gradient, sums);                                           \
    }                                                                                                        \
    extern "C" __global__ void scale_columns_##name(                                                         \
        uint64 len, uint32 columns, const T* input, const float* weight, T* output) {                        \
        scale_columns<T>(len, columns, input, weight, output);                                               \
    }                                                                                                        \
    extern "C" __global__ void scale_columns_backward_weight_##name(                                         \
        uint32 rows, uint32 columns, uint32 width, float epsilon, int is_centred, const T* input,            \
        const T* gradient, float* sums, int accumulate) {                                                    \
        layer_norm_backward_weight<T, false>(                                                                \
            rows, columns, width, epsilon, is_centred, input, gradient, sums, accumulate);                   \
    }

FOR_BOTH(NORMS)
