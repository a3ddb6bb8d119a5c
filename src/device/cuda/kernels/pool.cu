// Pooling on its own, channels last. `argmax` holds the place of the maximum in its window, in
// reading order.

struct PoolShape {
    uint32 rows, height, width, channels, window_height, window_width;
};

// Returns the index in the input of the first element of the window of output `at`.
__device__ __forceinline__ uint64 window_start(const PoolShape& shape, uint64 at) {
    uint32 height = shape.height / shape.window_height, width = shape.width / shape.window_width;
    uint32 channel = at % shape.channels, x = at / shape.channels % width;
    uint64 y = at / shape.channels / width % height, row = at / shape.channels / width / height;
    uint64 top = row * shape.height + y * shape.window_height, left = x * shape.window_width;
    return (top * shape.width + left) * shape.channels + channel;
}

// Returns the index of the output of the window that input `at` is in, and the place there, or false if
// it is in none.
__device__ __forceinline__ bool find_window(
    const PoolShape& shape, uint64 at, uint64* output, uint32* place) {
    uint32 height = shape.height / shape.window_height, width = shape.width / shape.window_width;
    uint32 channel = at % shape.channels, x = at / shape.channels % shape.width;
    uint64 y = at / shape.channels / shape.width % shape.height;
    uint64 row = at / shape.channels / shape.width / shape.height;
    uint64 window = (row * height + y / shape.window_height) * width + x / shape.window_width;
    *output = window * shape.channels + channel;
    *place = y % shape.window_height * shape.window_width + x % shape.window_width;
    return y / shape.window_height < height && x / shape.window_width < width;
}

__device__ __forceinline__ uint64 num_outputs(const PoolShape& shape) {
    uint32 height = shape.height / shape.window_height, width = shape.width / shape.window_width;
    return (uint64)shape.rows * height * width * shape.channels;
}

__device__ __forceinline__ uint64 num_inputs(const PoolShape& shape) {
    return (uint64)shape.rows * shape.height * shape.width * shape.channels;
}

// Threads take 4 channels at a time, where their number allows it: these are neighbours in memory and in the
// same window.
template <class T>
__device__ __forceinline__ void max_pool_forward(
    PoolShape shape, const T* __restrict__ input, T* __restrict__ argmax, T* __restrict__ output) {
    uint64 alignment = (uint64)input | (uint64)argmax | (uint64)output | 4 * shape.channels;
    over_values<4>(num_outputs(shape), alignment, [&](uint64 at, auto count) {
        const T* window = input + window_start(shape, at);
        Several<T, count.value> best = load<count.value>(window), places;
        for (uint32 i = 0; i < count.value; i++) {
            put_number(&places.at[i], 0);
        }
        for (uint32 candidate = 1; candidate < shape.window_height * shape.window_width; candidate++) {
            uint32 down = candidate / shape.window_width, right = candidate % shape.window_width;
            const T* place = window + (down * shape.width + right) * shape.channels;
            Several<T, count.value> values = load<count.value>(place);
            for (uint32 i = 0; i < count.value; i++) {
                float value = to_float(values.at[i]);
                // NaN propagates, as in PyTorch
                if (value > to_float(best.at[i]) || value != value) {
                    best.at[i] = values.at[i];
                    put_number(&places.at[i], candidate);
                }
            }
        }
        store(output + at, best);
        store(argmax + at, places);
    });
}

template <class T>
__device__ __forceinline__ void max_pool_backward(
    PoolShape shape, const T* __restrict__ argmax, const T* __restrict__ gradient,
    T* __restrict__ input_gradient) {
    uint64 alignment = (uint64)argmax | (uint64)gradient | (uint64)input_gradient | 4 * shape.channels;
    over_values<4>(num_inputs(shape), alignment, [&](uint64 at, auto count) {
        uint64 from;
        uint32 place;
        Several<T, count.value> gradients = {};
        if (find_window(shape, at, &from, &place)) {
            Several<T, count.value> places = load<count.value>(argmax + from);
            gradients = load<count.value>(gradient + from);
            for (uint32 i = 0; i < count.value; i++) {
                gradients.at[i] = get_number(places.at[i]) == place ? gradients.at[i] : from_float<T>(0);
            }
        }
        store(input_gradient + at, gradients);
    });
}

template <class T>
__device__ __forceinline__ void average_pool_forward(
    PoolShape shape, const T* __restrict__ input, T* __restrict__ output) {
    uint64 alignment = (uint64)input | (uint64)output | 4 * shape.channels;
    over_values<4>(num_outputs(shape), alignment, [&](uint64 at, auto count) {
        const T* window = input + window_start(shape, at);
        Several<float, count.value> sums = {};
        for (uint32 down = 0; down < shape.window_height; down++) {
            for (uint32 right = 0; right < shape.window_width; right++) {
                const T* place = window + (down * shape.width + right) * shape.channels;
                Several<T, count.value> values = load<count.value>(place);
                for (uint32 i = 0; i < count.value; i++) {
                    sums.at[i] += to_float(values.at[i]);
                }
            }
        }
        Several<T, count.value> means;
        for (uint32 i = 0; i < count.value; i++) {
            means.at[i] = from_float<T>(sums.at[i] / (shape.window_height * shape.window_width));
        }
        store(output + at, means);
    });
}

template <class T>
__device__ __forceinline__ void average_pool_backward(
    PoolShape shape, const T* __restrict__ gradient, T* __restrict__ input_gradient) {
    uint64 alignment = (uint64)gradient | (uint64)input_gradient | 4 * shape.channels;
    over_values<4>(num_inputs(shape), alignment, [&](uint64 at, auto count) {
        uint64 from;
        uint32 place, window_len = shape.window_height * shape.window_width;
        Several<T, count.value> gradients = {};
        if (find_window(shape, at, &from, &place)) {
            gradients = load<count.value>(gradient + from);
            for (uint32 i = 0; i < count.value; i++) {
                gradients.at[i] = from_float<T>(to_float(gradients.at[i]) / window_len);
            }
        }
        store(input_gradient + at, gradients);
    });
}

#define POOLS(T, name)                                                                                       \
    extern "C" __global__ void max_pool_forward_##name(                                                      \
        PoolShape shape, const T* input, T* argmax, T* output) {                                             \
        max_pool_forward<T>(shape, input, argmax, output);                                                   \
    }                                                                                                        \
    extern "C" __global__ void max_pool_backward_##name(                                                     \
        PoolShape shape, const T* argmax, const T* gradient, T* input_gradient) {                            \
        max_pool_backward<T>(shape, argmax, gradient, input_gradient);                                       \
    }                                                                                                        \
    extern "C" __global__ void average_pool_forward_##name(PoolShape shape, const T* input, T* output) {     \
        average_pool_forward<T>(shape, input, output);                                                       \
    }                                                                                                        \
    extern "C" __global__ void average_pool_backward_##name(                                                 \
        PoolShape shape, const T* gradient, T* input_gradient) {                                             \
        average_pool_backward<T>(shape, gradient, input_gradient);                                           \
    }

FOR_BOTH(POOLS)
