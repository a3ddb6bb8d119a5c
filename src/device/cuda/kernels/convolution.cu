// Convolution with bias, 2 × 2 max-pooling and ReLU, channels last, and its gradients.
//
// Indices into an image count the zeros around it. A block works on one image at a time. If an image
// with its zeros and the weights fit into shared memory (`STAGED`), they are copied there once, as
// floats; otherwise they are read from global memory.
// The constants `FORMAT` and `SHAPE`, the numbers from `channels` to `flattens`, choose the kernels: loops of
// a known length are unrolled, and indices take no divisions. Without them the kernels are for any shape.
// `argmax` holds the place of the maximum in its window, 0 to 3 in reading order: the gradient of a
// pooled output belongs to that one of four outputs of the convolution. It is NO_PLACE if ReLU set the output
// to 0.

#include "convolution_weight.cuh"

// The most threads of a block that is divided into slices.
const uint32 MOST_THREADS = 1024;

// Adds up the terms of group `group`, four output channels at one place, for each of the places that pooling
// chooses from, over the rows `first`, `first` + `step`, … of the kernel.
template <class T, bool STAGED>
__device__ __forceinline__ void add_taps(
    const ConvolutionShape& shape, const T* input, const float* weight, const float* weights, uint32 group,
    uint32 first, uint32 step, float (&sums)[OUTPUTS][4]) {
    extern __shared__ __align__(16) float shared[];
    uint32 width = output_width(shape), row_len = padded_width(shape) * shape.channels;
    uint32 num_places = shape.window * shape.window, depth = padded_outputs(shape);
    uint32 num_groups = depth / OUTPUTS, out = group % num_groups * OUTPUTS;
    uint32 x = group / num_groups % width, y = group / num_groups / width;
    uint32 top = y * shape.window * shape.stride, left = x * shape.window * shape.stride;
    uint32 origin = top * row_len + left * shape.channels;
    for (uint32 ky = first; ky < shape.kernel; ky += step) {
#pragma unroll 8
        for (uint32 run = 0; run < shape.kernel * shape.channels; run++) {
            uint32 kx = run / shape.channels, channel = run % shape.channels;
            uint32 tap = ky * shape.kernel * shape.channels + run;
            Several<float, OUTPUTS> w;
            if (STAGED) {
                w = load<OUTPUTS>(weights + tap * depth + out);
            } else {
                for (uint32 i = 0; i < OUTPUTS; i++) {
                    uint32 other = min(out + i, shape.outputs - 1);
                    w.at[i] = weight[weight_index(shape, other, channel, ky, kx)];
                }
            }
            uint32 start = origin + ky * row_len + run;
            for (uint32 place = 0; place < 4; place++) {
                if (place < num_places) {
                    uint32 from = start + place / 2 * row_len + place % 2 * shape.channels;
                    float value = STAGED ? shared[from] : pixel(shape, input, from);
                    for (uint32 i = 0; i < OUTPUTS; i++) {
                        sums[i][place] += w.at[i] * value;
                    }
                }
            }
        }
    }
}

// Stores an output: the largest of the sums of its window, with bias and ReLU, and its place.
template <class T>
__device__ __forceinline__ void store_largest(
    const ConvolutionShape& shape, const float (&sums)[4], uint32 at, const float* bias, T* argmax,
    T* output) {
    float best = sums[0];
    uint32 chosen = 0;
    for (uint32 place = 1; place < 4; place++) {
        // NaN propagates, as in PyTorch
        bool is_larger = sums[place] > best || sums[place] != sums[place];
        if (place < shape.window * shape.window && is_larger) {
            best = sums[place];
            chosen = place;
        }
    }
    best += bias ? bias[at % shape.outputs] : 0;
    output[output_place(shape, at)] = from_float<T>(shape.relu && best < 0 ? 0 : best);
    if (shape.window > 1) {
        // as in derive, NaN passes no gradient
        put_number(&argmax[at], shape.relu && !(best > 0) ? NO_PLACE : chosen);
    }
}

// Computes the outputs of image `blockIdx.x`, a group per thread at a time, output channels fastest. More
// than `width` threads are further slices, which share the rows of the kernel; then there is a thread of each
// slice for every group, and images are `STAGED`.
template <class T, bool STAGED>
__device__ __forceinline__ void forward(
    ConvolutionShape shape, const T* input, const float* weight, const float* bias, T* argmax, T* output,
    uint32 width) {
    extern __shared__ __align__(16) float shared[];
    uint32 num_groups = padded_outputs(shape) / OUTPUTS;
    uint32 num_places = output_height(shape) * output_width(shape), len = num_places * shape.outputs;
    input += (uint64)blockIdx.x * shape.height * shape.width * shape.channels;
    argmax += (uint64)blockIdx.x * len;
    output += (uint64)blockIdx.x * len;
    float* weights = shared + (padded_len(shape) + 3) / 4 * 4;
    uint32 slice = threadIdx.x / width, slices = blockDim.x / width;
    if (STAGED) {
        stage_image(shape, shared, input);
        stage_weights(shape, weights, weight);
        __syncthreads();
    }
    auto store_output = [&](uint32 group, uint32 i, const float(&sums)[4]) {
        uint32 out = group % num_groups * OUTPUTS + i;
        if (out < shape.outputs) {
            store_largest(shape, sums, group / num_groups * shape.outputs + out, bias, argmax, output);
        }
    };
    float sums[OUTPUTS][4] = {};
    uint32 candidates = shape.window * shape.window;
    for (uint32 group = threadIdx.x % width; group < num_places * num_groups; group += width) {
        for (uint32 i = 0; i < 4 * OUTPUTS; i++) {
            sums[i / 4][i % 4] = 0;
        }
        add_taps<T, STAGED>(shape, input, weight, weights, group, slice, slices, sums);
        for (uint32 i = 0; slices == 1 && i < OUTPUTS; i++) {
            store_output(group, i, sums[i]);
        }
    }
    if (slices > 1) {
        // the sums of the slices take the place of the weights
        __syncthreads();
        for (uint32 i = 0; i < OUTPUTS; i++) {
            for (uint32 place = 0; place < candidates; place++) {
                weights[(candidates * i + place) * blockDim.x + threadIdx.x] = sums[i][place];
            }
        }
        __syncthreads();
        for (uint32 at = threadIdx.x; at < OUTPUTS * width; at += blockDim.x) {
            uint32 group = at % width, i = at / width;
            float all[4] = {0, 0, 0, 0};
            for (uint32 other = 0; other < slices; other++) {
                for (uint32 place = 0; place < candidates; place++) {
                    all[place] += weights[(candidates * i + place) * blockDim.x + other * width + group];
                }
            }
            if (group < num_places * num_groups) {
                store_output(group, i, all);
            }
        }
    }
}

// Columns of an image whose gradients a thread of backward_input_dense computes, and the largest kernel.
const uint32 COLUMNS = 4, LARGEST_KERNEL = 7;

// Computes the gradients of the inputs of image `blockIdx.x` for kernels of stride 1: the gradients of the
// convolution's outputs, with the zeros of those that are not maxima and with zeros around them, are in
// shared memory, and so are the weights. More than `width` threads are further slices, which share the
// outputs; then there is a thread of each slice for every group of columns.
template <class T>
__device__ __forceinline__ void backward_input_dense(
    ConvolutionShape shape, const float* weight, const T* argmax, const T* gradient, T* input_gradient,
    uint32 width) {
    extern __shared__ __align__(16) float shared[];
    // no larger kernel is started, but it is compiled too
    uint32 reach = min(shape.kernel, LARGEST_KERNEL) - 1;
    uint32 taps = shape.kernel * shape.kernel * shape.channels;
    uint32 len = output_height(shape) * output_width(shape) * shape.outputs, depth = padded_outputs(shape);
    uint32 dense_height = shape.height + 2 * shape.padding + reach, row_len = padded_width(shape) + reach;
    float* dense = shared + taps * depth;
    argmax += (uint64)blockIdx.x * len;
    gradient += (uint64)blockIdx.x * len;
    input_gradient += (uint64)blockIdx.x * shape.height * shape.width * shape.channels;
    const Several<float, OUTPUTS> zeros = {};
    for (uint32 at = threadIdx.x; at < (taps + dense_height * row_len) * depth / OUTPUTS; at += blockDim.x) {
        store(shared + OUTPUTS * at, zeros);
    }
    __syncthreads();
    stage_weights(shape, shared, weight);
    auto read = [&](uint32 at) {
        uint32 x, y = source_row(shape, argmax, at, &x);
        return Placed{(y + reach) * row_len + x + reach, taken_gradient(shape, argmax, gradient, at)};
    };
    in_batches(len, read, [&](uint32 at, Placed found) {
        dense[found.place * depth + at % shape.outputs] = found.value;
    });
    __syncthreads();
    uint32 groups = (shape.width + COLUMNS - 1) / COLUMNS;
    uint32 num_groups = shape.height * groups * shape.channels;
    uint32 slice = threadIdx.x / width, slices = blockDim.x / width;
    auto store_gradient = [&](uint32 at, uint32 i, float sum) {
        uint32 channel = at % shape.channels, x = at / shape.channels % groups * COLUMNS + i;
        uint32 y = at / shape.channels / groups;
        if (x < shape.width && at < num_groups) {
            input_gradient[(y * shape.width + x) * shape.channels + channel] = from_float<T>(sum);
        }
    };
    float sums[COLUMNS] = {0, 0, 0, 0};
    for (uint32 at = threadIdx.x % width; at < num_groups; at += width) {
        uint32 channel = at % shape.channels, x = at / shape.channels % groups * COLUMNS;
        uint32 y = at / shape.channels / groups;
        for (uint32 i = 0; i < COLUMNS; i++) {
            sums[i] = 0;
        }
        for (uint32 ky = 0; ky < shape.kernel; ky++) {
            uint32 place = (y + shape.padding + reach - ky) * row_len + x + shape.padding;
            for (uint32 out = slice * OUTPUTS; out < depth; out += slices * OUTPUTS) {
                Several<float, OUTPUTS> values[LARGEST_KERNEL + COLUMNS - 1];
#pragma unroll
                for (uint32 i = 0; i < LARGEST_KERNEL + COLUMNS - 1; i++) {
                    // the last group may reach beyond the last column
                    bool is_needed = i < COLUMNS + reach && x + i < shape.width + reach;
                    values[i] = is_needed ? load<OUTPUTS>(dense + (place + i) * depth + out) : zeros;
                }
#pragma unroll
                for (uint32 kx = 0; kx < LARGEST_KERNEL; kx++) {
                    if (kx < shape.kernel) {
                        uint32 tap = (ky * shape.kernel + kx) * shape.channels + channel;
                        Several<float, OUTPUTS> w = load<OUTPUTS>(shared + tap * depth + out);
#pragma unroll
                        for (uint32 i = 0; i < COLUMNS; i++) {
#pragma unroll
                            for (uint32 j = 0; j < OUTPUTS; j++) {
                                sums[i] += w.at[j] * values[i + reach - kx].at[j];
                            }
                        }
                    }
                }
            }
        }
        for (uint32 i = 0; slices == 1 && i < COLUMNS; i++) {
            store_gradient(at, i, sums[i]);
        }
    }
    if (slices > 1) {
        // the sums of the slices take the place of the weights and gradients
        __syncthreads();
        for (uint32 i = 0; i < COLUMNS; i++) {
            shared[i * blockDim.x + threadIdx.x] = sums[i];
        }
        __syncthreads();
        for (uint32 at = threadIdx.x; at < COLUMNS * width; at += blockDim.x) {
            float sum = 0;
            for (uint32 other = 0; other < slices; other++) {
                sum += shared[at / width * blockDim.x + other * width + at % width];
            }
            store_gradient(at % width, at / width, sum);
        }
    }
}

// Computes the gradients of the inputs of image `blockIdx.x`, one per thread at a time, channels
// fastest; blocks with the same `blockIdx.x` take turns. Each input sums over the pooled outputs
// whose windows may cover it. With `STAGED`, weights [output, ky, kx, channel], gradients and their
// places are in shared memory.
template <class T, bool STAGED>
__device__ __forceinline__ void backward_input(
    ConvolutionShape shape, const float* weight, const T* argmax, const T* gradient, T* input_gradient) {
    extern __shared__ __align__(16) float shared[];
    uint32 image_len = shape.height * shape.width * shape.channels;
    uint32 height = output_height(shape), width = output_width(shape), len = height * width * shape.outputs;
    uint32 taps = shape.kernel * shape.kernel * shape.channels;
    float* gradients = shared + taps * shape.outputs;
    // row in the upper half, column in the lower
    uint32* places = (uint32*)(gradients + len);
    argmax += (uint64)blockIdx.x * len;
    gradient += (uint64)blockIdx.x * len;
    input_gradient += (uint64)blockIdx.x * image_len;
    if (STAGED) {
        auto read = [&](uint32 at) {
            uint32 channel = at % shape.channels, place = at / shape.channels;
            uint32 kx = place % shape.kernel, ky = place / shape.kernel % shape.kernel;
            return weight[weight_index(shape, place / shape.kernel / shape.kernel, channel, ky, kx)];
        };
        in_batches(taps * shape.outputs, read, [&](uint32 at, float value) { shared[at] = value; });
        auto gradient_of = [&](uint32 at) { return taken_gradient(shape, argmax, gradient, at); };
        in_batches(len, gradient_of, [&](uint32 at, float value) { gradients[at] = value; });
        auto place_of = [&](uint32 at) {
            uint32 x, y = source_row(shape, argmax, at, &x);
            return y << 16 | x;
        };
        in_batches(len, place_of, [&](uint32 at, uint32 place) { places[at] = place; });
        __syncthreads();
    }
    for (uint32 at = blockIdx.y * blockDim.x + threadIdx.x; at < image_len; at += gridDim.y * blockDim.x) {
        uint32 channel = at % shape.channels, x = at / shape.channels % shape.width + shape.padding;
        uint32 y = at / shape.channels / shape.width + shape.padding;
        uint32 reach = shape.kernel - 1, step = shape.window * shape.stride;
        uint32 top = (y > reach ? y - reach : 0) / step, bottom = min(y / step, height - 1);
        uint32 left = (x > reach ? x - reach : 0) / step, right = min(x / step, width - 1);
        float sum = 0;
        for (uint32 py = top; py <= bottom; py++) {
            for (uint32 px = left; px <= right; px++) {
                for (uint32 out = 0; out < shape.outputs; out++) {
                    uint32 from = (py * width + px) * shape.outputs + out, cx, cy;
                    if (STAGED) {
                        cy = places[from] >> 16;
                        cx = places[from] & 0xffff;
                    } else {
                        cy = source_row(shape, argmax, from, &cx);
                    }
                    // unsigned: a place that is too far down or right is out of range as well
                    uint32 ky = y - cy, kx = x - cx;
                    if (ky < shape.kernel && kx < shape.kernel) {
                        uint32 tap = (out * shape.kernel + ky) * shape.kernel + kx;
                        sum += STAGED
                            ? gradients[from] * shared[tap * shape.channels + channel]
                            : taken_gradient(shape, argmax, gradient, from)
                                * weight[weight_index(shape, out, channel, ky, kx)];
                    }
                }
            }
        }
        input_gradient[at] = from_float<T>(sum);
    }
}

// Returns the shape of the layer, with the constants that the kernels are compiled for.
__device__ __forceinline__ ConvolutionShape known_shape(const ConvolutionShape& shape) {
#ifdef SHAPE
    return {shape.rows, SHAPE, shape.relu};
#else
    return shape;
#endif
}

#define CONVOLUTIONS(T, name)                                                                                \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS) convolution_forward_##name(                   \
        ConvolutionShape given, const T* input, const float* weight, const float* bias, T* argmax,           \
        T* output, uint32 width, int staged) {                                                               \
        ConvolutionShape shape = known_shape(given);                                                         \
        staged ? forward<T, true>(shape, input, weight, bias, argmax, output, width)                         \
               : forward<T, false>(shape, input, weight, bias, argmax, output, width);                       \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS) convolution_backward_weight_##name(         \
        ConvolutionShape given, const T* input, const T* argmax, const T* gradient, float* partials,         \
        uint32 width, int has_bias, int staged) {                                                            \
        ConvolutionShape shape = known_shape(given);                                                         \
        staged ? backward_weight<T, true>(shape, input, argmax, gradient, partials, width, has_bias)         \
               : backward_weight<T, false>(shape, input, argmax, gradient, partials, width, has_bias);       \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(512) convolution_backward_input_##name(                     \
        ConvolutionShape given, const float* weight, const T* argmax, const T* gradient,                     \
        T* input_gradient, int staged) {                                                                     \
        ConvolutionShape shape = known_shape(given);                                                         \
        staged ? backward_input<T, true>(shape, weight, argmax, gradient, input_gradient)                    \
               : backward_input<T, false>(shape, weight, argmax, gradient, input_gradient);                  \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS) convolution_backward_input_dense_##name(      \
        ConvolutionShape given, const float* weight, const T* argmax, const T* gradient,                     \
        T* input_gradient, uint32 width) {                                                                   \
        backward_input_dense<T>(known_shape(given), weight, argmax, gradient, input_gradient, width);        \
    }

#define CONVOLUTIONS_OF(name) CONVOLUTIONS(name, name)

#ifdef FORMAT
CONVOLUTIONS_OF(FORMAT)
#else
FOR_BOTH(CONVOLUTIONS)
#endif
