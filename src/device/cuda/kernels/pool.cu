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

template <class T>
__device__ __forceinline__ void max_pool_forward(PoolShape shape, const T* input, T* argmax, T* output) {
    for (uint64 at = thread_index(); at < num_outputs(shape); at += num_threads()) {
        const T* window = input + window_start(shape, at);
        float best = to_float(window[0]);
        uint32 place = 0;
        for (uint32 candidate = 1; candidate < shape.window_height * shape.window_width; candidate++) {
            uint32 down = candidate / shape.window_width, right = candidate % shape.window_width;
            float value = to_float(window[(down * shape.width + right) * shape.channels]);
            // NaN propagates, as in PyTorch
            if (value > best || value != value) {
                best = value;
                place = candidate;
            }
        }
        output[at] = from_float<T>(best);
        put_number(&argmax[at], place);
    }
}

template <class T>
__device__ __forceinline__ void max_pool_backward(
    PoolShape shape, const T* argmax, const T* gradient, T* input_gradient) {
    for (uint64 at = thread_index(); at < num_inputs(shape); at += num_threads()) {
        uint64 from;
        uint32 place;
        bool is_chosen = find_window(shape, at, &from, &place) && get_number(argmax[from]) == place;
        input_gradient[at] = from_float<T>(is_chosen ? to_float(gradient[from]) : 0);
    }
}

template <class T>
__device__ __forceinline__ void average_pool_forward(PoolShape shape, const T* input, T* output) {
    for (uint64 at = thread_index(); at < num_outputs(shape); at += num_threads()) {
        const T* window = input + window_start(shape, at);
        float sum = 0;
        for (uint32 down = 0; down < shape.window_height; down++) {
            for (uint32 right = 0; right < shape.window_width; right++) {
                sum += to_float(window[(down * shape.width + right) * shape.channels]);
            }
        }
        output[at] = from_float<T>(sum / (shape.window_height * shape.window_width));
    }
}

template <class T>
__device__ __forceinline__ void average_pool_backward(PoolShape shape, const T* gradient, T* input_gradient) {
    for (uint64 at = thread_index(); at < num_inputs(shape); at += num_threads()) {
        uint64 from;
        uint32 place, window_len = shape.window_height * shape.window_width;
        bool is_inside = find_window(shape, at, &from, &place);
        input_gradient[at] = from_float<T>(is_inside ? to_float(gradient[from]) / window_len : 0);
    }
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
