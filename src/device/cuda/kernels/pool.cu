// Pooling on its own, channels last. `argmax` holds the place of the maximum in its window, in
// reading order.

struct PoolShape {
    uint32 rows, height, width, channels, window_height, window_width, stride_height, stride_width, padding;
};

__device__ __forceinline__ uint32 output_height(const PoolShape& shape) {
    return (shape.height + 2 * shape.padding - shape.window_height) / shape.stride_height + 1;
}

__device__ __forceinline__ uint32 output_width(const PoolShape& shape) {
    return (shape.width + 2 * shape.padding - shape.window_width) / shape.stride_width + 1;
}

__device__ __forceinline__ uint64 num_outputs(const PoolShape& shape) {
    return (uint64)shape.rows * output_height(shape) * output_width(shape) * shape.channels;
}

__device__ __forceinline__ uint64 num_inputs(const PoolShape& shape) {
    return (uint64)shape.rows * shape.height * shape.width * shape.channels;
}

// Stores sums in the format of activations.
template <class T, uint32 N>
__device__ __forceinline__ void store_rounded(T* into, const Several<float, N>& sums) {
    Several<T, N> values;
    for (uint32 i = 0; i < N; i++) {
        values.at[i] = from_float<T>(sums.at[i]);
    }
    store(into, values);
}

// Calls `body(place, from)` for each element of the window of output `at` that is in the image: its place in
// reading order, and its index in the input.
template <class Body>
__device__ __forceinline__ void over_window(const PoolShape& shape, uint64 at, Body body) {
    uint32 height = output_height(shape), width = output_width(shape), channel = at % shape.channels;
    uint64 place = at / shape.channels;
    // unsigned: what is above or left of the image is out of range as well
    uint32 left = place % width * shape.stride_width - shape.padding;
    uint32 top = place / width % height * shape.stride_height - shape.padding;
    uint64 image = place / width / height * shape.height;
    for (uint32 down = 0; down < shape.window_height; down++) {
        for (uint32 right = 0; right < shape.window_width; right++) {
            uint32 y = top + down, x = left + right;
            if (y < shape.height && x < shape.width) {
                uint64 from = ((image + y) * shape.width + x) * shape.channels + channel;
                body(down * shape.window_width + right, from);
            }
        }
    }
}

// Calls `body(place, from)` for each window that input `at` is in: its place there, and the index of the
// output.
template <class Body>
__device__ __forceinline__ void over_windows(const PoolShape& shape, uint64 at, Body body) {
    uint32 height = output_height(shape), width = output_width(shape), channel = at % shape.channels;
    uint64 place = at / shape.channels;
    uint32 x = place % shape.width + shape.padding, y = place / shape.width % shape.height + shape.padding;
    uint64 image = place / shape.width / shape.height * height;
    uint32 top = y < shape.window_height ? 0 : (y - shape.window_height) / shape.stride_height + 1;
    uint32 left = x < shape.window_width ? 0 : (x - shape.window_width) / shape.stride_width + 1;
    for (uint32 row = top; row < height && row * shape.stride_height <= y; row++) {
        for (uint32 column = left; column < width && column * shape.stride_width <= x; column++) {
            uint32 down = y - row * shape.stride_height, right = x - column * shape.stride_width;
            uint64 from = ((image + row) * width + column) * shape.channels + channel;
            body(down * shape.window_width + right, from);
        }
    }
}

// Threads take 16 bytes of channels at a time, where their number allows it: these are neighbours in memory
// and in the same window.
template <class T>
__device__ __forceinline__ void max_pool_forward(
    PoolShape shape, const T* __restrict__ input, T* __restrict__ argmax, T* __restrict__ output) {
    uint64 alignment = (uint64)input | (uint64)argmax | (uint64)output | sizeof(T) * shape.channels;
    over_values<16 / sizeof(T)>(num_outputs(shape), alignment, [&](uint64 at, auto count) {
        constexpr uint32 each = count.value;
        Several<T, each> best = {}, places = {};
        bool is_first = true;
        over_window(shape, at, [&](uint32 place, uint64 from) {
            Several<T, each> values = load<each>(input + from);
            for (uint32 i = 0; i < each; i++) {
                float value = to_float(values.at[i]);
                // NaN propagates, as in PyTorch
                if (is_first || value > to_float(best.at[i]) || value != value) {
                    best.at[i] = values.at[i];
                    put_number(&places.at[i], place);
                }
            }
            is_first = false;
        });
        store(output + at, best);
        store(argmax + at, places);
    });
}

template <class T>
__device__ __forceinline__ void max_pool_backward(
    PoolShape shape, const T* __restrict__ argmax, const T* __restrict__ gradient,
    T* __restrict__ input_gradient) {
    uint64 alignment =
        (uint64)argmax | (uint64)gradient | (uint64)input_gradient | sizeof(T) * shape.channels;
    over_values<16 / sizeof(T)>(num_inputs(shape), alignment, [&](uint64 at, auto count) {
        constexpr uint32 each = count.value;
        Several<float, each> sums = {};
        over_windows(shape, at, [&](uint32 place, uint64 from) {
            Several<T, each> places = load<each>(argmax + from);
            Several<T, each> gradients = load<each>(gradient + from);
            for (uint32 i = 0; i < each; i++) {
                sums.at[i] += get_number(places.at[i]) == place ? to_float(gradients.at[i]) : 0;
            }
        });
        store_rounded(input_gradient + at, sums);
    });
}

// Adds in doubles, as on the CPU: over an image of 2048 x 2048 of one colour, a chain of floats errs by 4 %.
template <class T>
__device__ __forceinline__ void average_pool_forward(
    PoolShape shape, const T* __restrict__ input, T* __restrict__ output) {
    uint64 alignment = (uint64)input | (uint64)output | sizeof(T) * shape.channels;
    over_values<16 / sizeof(T)>(num_outputs(shape), alignment, [&](uint64 at, auto count) {
        constexpr uint32 each = count.value;
        double sums[each] = {};
        over_window(shape, at, [&](uint32, uint64 from) {
            Several<T, each> values = load<each>(input + from);
            for (uint32 i = 0; i < each; i++) {
                sums[i] += to_float(values.at[i]);
            }
        });
        Several<float, each> means;
        for (uint32 i = 0; i < each; i++) {
            means.at[i] = sums[i] / (shape.window_height * shape.window_width);
        }
        store_rounded(output + at, means);
    });
}

template <class T>
__device__ __forceinline__ void average_pool_backward(
    PoolShape shape, const T* __restrict__ gradient, T* __restrict__ input_gradient) {
    uint64 alignment = (uint64)gradient | (uint64)input_gradient | sizeof(T) * shape.channels;
    over_values<16 / sizeof(T)>(num_inputs(shape), alignment, [&](uint64 at, auto count) {
        constexpr uint32 each = count.value;
        uint32 window_len = shape.window_height * shape.window_width;
        Several<float, each> sums = {};
        over_windows(shape, at, [&](uint32, uint64 from) {
            Several<T, each> gradients = load<each>(gradient + from);
            for (uint32 i = 0; i < each; i++) {
                sums.at[i] += to_float(gradients.at[i]) / window_len;
            }
        });
        store_rounded(input_gradient + at, sums);
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
