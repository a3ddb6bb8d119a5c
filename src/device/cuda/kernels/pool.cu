// Max-pooling on its own, channels last. `argmax` holds the place of the maximum in its window, in
// reading order.

struct PoolShape {
    uint32 rows, height, width, channels, size;
};

template <class T>
__device__ __forceinline__ void pool_forward(PoolShape shape, const T* input, T* argmax, T* output) {
    uint32 height = shape.height / shape.size, width = shape.width / shape.size;
    uint64 len = (uint64)shape.rows * height * width * shape.channels;
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint32 channel = at % shape.channels, x = at / shape.channels % width;
        uint64 y = at / shape.channels / width % height, row = at / shape.channels / width / height;
        uint64 top = row * shape.height + y * shape.size, left = x * shape.size;
        uint64 origin = (top * shape.width + left) * shape.channels;
        const T* window = input + origin + channel;
        float best = to_float(window[0]);
        uint32 place = 0;
        for (uint32 candidate = 1; candidate < shape.size * shape.size; candidate++) {
            uint32 down = candidate / shape.size, right = candidate % shape.size;
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
__device__ __forceinline__ void pool_backward(
    PoolShape shape, const T* argmax, const T* gradient, T* input_gradient) {
    uint32 height = shape.height / shape.size, width = shape.width / shape.size;
    uint64 len = (uint64)shape.rows * shape.height * shape.width * shape.channels;
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint32 channel = at % shape.channels, x = at / shape.channels % shape.width;
        uint64 y = at / shape.channels / shape.width % shape.height;
        uint64 row = at / shape.channels / shape.width / shape.height;
        float value = 0;
        if (y / shape.size < height && x / shape.size < width) {
            uint64 window = (row * height + y / shape.size) * width + x / shape.size;
            uint64 from = window * shape.channels + channel;
            if (get_number(argmax[from]) == y % shape.size * shape.size + x % shape.size) {
                value = to_float(gradient[from]);
            }
        }
        input_gradient[at] = from_float<T>(value);
    }
}

#define POOLS(T, name)                                                                                       \
    extern "C" __global__ void max_pool_forward_##name(                                                      \
        PoolShape shape, const T* input, T* argmax, T* output) {                                             \
        pool_forward<T>(shape, input, argmax, output);                                                       \
    }                                                                                                        \
    extern "C" __global__ void max_pool_backward_##name(                                                     \
        PoolShape shape, const T* argmax, const T* gradient, T* input_gradient) {                            \
        pool_backward<T>(shape, argmax, gradient, input_gradient);                                           \
    }

FOR_BOTH(POOLS)
