// Convolution with bias, 2 × 2 max-pooling and ReLU, channels last, and its gradients.
//
// Indices into an image count the zeros around it. A block works on one image at a time. If an image
// with its zeros and the weights fit into shared memory (`STAGED`), they are copied there once, as
// floats; otherwise they are read from global memory.
// The constants `FORMAT` and `SHAPE`, the numbers from `channels` to `window`, choose the kernels: loops of a
// known length are unrolled, and indices take no divisions. Without them the kernels are for any shape.
// `argmax` holds the place of the maximum in its window, 0 to 3 in reading order: the gradient of a
// pooled output belongs to that one of four outputs of the convolution.

#include "image.cuh"

// The most threads of a block that is divided into slices.
const uint32 MOST_THREADS = 1024;

// Adds up the terms of the outputs that output `at` is the maximum of, over the rows `first`, `first` +
// `step`, … of the kernel.
template <class T, bool STAGED>
__device__ __forceinline__ void add_taps(
    const ConvolutionShape& shape, const T* input, const float* weight, const float* weights, uint32 at,
    uint32 first, uint32 step, float (&sums)[4]) {
    extern __shared__ float shared[];
    uint32 width = output_width(shape), row_len = padded_width(shape) * shape.channels;
    uint32 num_places = shape.window * shape.window;
    uint32 out = at % shape.outputs, x = at / shape.outputs % width, y = at / shape.outputs / width;
    uint32 top = y * shape.window * shape.stride, left = x * shape.window * shape.stride;
    uint32 origin = top * row_len + left * shape.channels;
    for (uint32 ky = first; ky < shape.kernel; ky += step) {
#pragma unroll 32
        for (uint32 run = 0; run < shape.kernel * shape.channels; run++) {
            uint32 kx = run / shape.channels, channel = run % shape.channels;
            uint32 tap = ky * shape.kernel * shape.channels + run;
            float w = STAGED
                ? weights[tap * shape.outputs + out]
                : weight[weight_index(shape, out, channel, ky, kx)];
            uint32 start = origin + ky * row_len + run;
            for (uint32 place = 0; place < 4; place++) {
                if (place < num_places) {
                    uint32 from = start + place / 2 * row_len + place % 2 * shape.channels;
                    sums[place] += w * (STAGED ? shared[from] : pixel(shape, input, from));
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
    output[at] = from_float<T>(shape.relu && best < 0 ? 0 : best);
    if (shape.window > 1) {
        put_number(&argmax[at], chosen);
    }
}

// Computes the outputs of image `blockIdx.x`, one per thread at a time, output channels fastest. More than
// `width` threads are further slices, which share the rows of the kernel; then there is a thread of each
// slice for every output, and images are `STAGED`.
template <class T, bool STAGED>
__device__ __forceinline__ void forward(
    ConvolutionShape shape, const T* input, const float* weight, const float* bias, T* argmax, T* output,
    uint32 width) {
    extern __shared__ float shared[];
    uint32 image_len = shape.height * shape.width * shape.channels;
    uint32 taps = shape.kernel * shape.kernel * shape.channels;
    uint32 len = output_height(shape) * output_width(shape) * shape.outputs;
    input += (uint64)blockIdx.x * image_len;
    argmax += (uint64)blockIdx.x * len;
    output += (uint64)blockIdx.x * len;
    float *weights = shared + padded_len(shape), *of_slices = weights + taps * shape.outputs;
    uint32 slice = threadIdx.x / width, slices = blockDim.x / width;
    if (STAGED) {
        stage_image(shape, shared, input);
        // [ky, kx, channel, output], so that neighbouring threads read neighbouring weights
        for (uint32 at = threadIdx.x; at < taps * shape.outputs; at += blockDim.x) {
            uint32 out = at % shape.outputs, tap = at / shape.outputs, channel = tap % shape.channels;
            uint32 place = tap / shape.channels;
            weights[at] = weight[(out * shape.channels + channel) * shape.kernel * shape.kernel + place];
        }
        __syncthreads();
    }
    for (uint32 at = threadIdx.x % width; at < len; at += width) {
        float sums[4] = {0, 0, 0, 0};
        add_taps<T, STAGED>(shape, input, weight, weights, at, slice, slices, sums);
        if (slices == 1) {
            store_largest(shape, sums, at, bias, argmax, output);
        }
        for (uint32 place = 0; slices > 1 && place < 4; place++) {
            of_slices[place * blockDim.x + threadIdx.x] = sums[place];
        }
    }
    if (slices > 1) {
        __syncthreads();
        if (threadIdx.x < len) {
            float sums[4] = {0, 0, 0, 0};
            for (uint32 at = threadIdx.x; at < blockDim.x; at += width) {
                for (uint32 place = 0; place < 4; place++) {
                    sums[place] += of_slices[place * blockDim.x + at];
                }
            }
            store_largest(shape, sums, threadIdx.x, bias, argmax, output);
        }
    }
}

// The most weights of a thread.
const uint32 MOST_WEIGHTS = 8;

// Sums the gradients of weights over the images `blockIdx.x`, `blockIdx.x + gridDim.x`, …, into row
// `blockIdx.x` of `partials`. `width` threads of a block have `each` weights, from number `blockIdx.y` ·
// `each` · `width` on; further threads are further slices, which share the places of an image. With `STAGED`,
// as slices need it, an image, its gradients and their places are in shared memory.
template <class T, bool STAGED>
__device__ __forceinline__ void backward_weight(
    ConvolutionShape shape, const T* input, const T* argmax, const T* gradient, float* partials,
    uint32 width) {
    extern __shared__ float shared[];
    uint32 image_len = shape.height * shape.width * shape.channels;
    uint32 len = output_height(shape) * output_width(shape) * shape.outputs;
    uint32 taps = shape.kernel * shape.kernel * shape.channels, num_weights = taps * shape.outputs;
    uint32 each = min(MOST_WEIGHTS, (num_weights + MOST_THREADS - 1) / MOST_THREADS);
    uint32 slice = threadIdx.x / width, slices = blockDim.x / width;
    float* gradients = shared + padded_len(shape);
    uint32 row_len = padded_width(shape) * shape.channels;
    uint32* starts = (uint32*)(gradients + len);
    float* of_slices = (float*)(starts + len);
    float sums[MOST_WEIGHTS];
    uint32 outs[MOST_WEIGHTS], offsets[MOST_WEIGHTS], first = blockIdx.y * each * width + threadIdx.x % width;
#pragma unroll
    for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
        uint32 number = min(first + i * width, num_weights - 1), tap = number % taps;
        uint32 run = shape.kernel * shape.channels;
        outs[i] = number / taps;
        offsets[i] = tap / run * row_len + tap % run;
        sums[i] = 0;
    }
    for (uint32 row = blockIdx.x; row < shape.rows; row += gridDim.x) {
        const T* image = input + (uint64)row * image_len;
        const T* image_gradient = gradient + (uint64)row * len;
        const T* image_argmax = argmax + (uint64)row * len;
        if (STAGED) {
            __syncthreads();
            stage_image(shape, shared, image);
            stage(gradients, image_gradient, len);
            for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
                uint32 x, y = source_row(shape, image_argmax, at, &x);
                starts[at] = y * row_len + x * shape.channels;
            }
            __syncthreads();
        }
#pragma unroll 4
        for (uint32 place = slice * shape.outputs; place < len; place += slices * shape.outputs) {
#pragma unroll
            for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
                if (i < each) {
                    uint32 at = place + outs[i];
                    if (STAGED) {
                        sums[i] += gradients[at] * shared[starts[at] + offsets[i]];
                    } else {
                        uint32 x, y = source_row(shape, image_argmax, at, &x);
                        uint32 start = y * row_len + x * shape.channels;
                        sums[i] += to_float(image_gradient[at]) * pixel(shape, image, start + offsets[i]);
                    }
                }
            }
        }
    }
    // then a thread has one weight
    if (slices > 1) {
        of_slices[threadIdx.x] = sums[0];
        __syncthreads();
        for (uint32 other = 1; slice == 0 && other < slices; other++) {
            sums[0] += of_slices[other * width + threadIdx.x];
        }
    }
#pragma unroll
    for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
        uint32 number = first + i * width;
        if (i < each && slice == 0 && number < num_weights) {
            uint32 tap = number % taps, channel = tap % shape.channels;
            uint32 kx = tap / shape.channels % shape.kernel, ky = tap / shape.channels / shape.kernel;
            uint32 index = weight_index(shape, outs[i], channel, ky, kx);
            partials[(uint64)blockIdx.x * num_weights + index] = sums[i];
        }
    }
}

// Columns of an image whose gradients a thread of backward_input_dense computes, and the largest kernel.
const uint32 COLUMNS = 4, LARGEST_KERNEL = 12;

// Computes the gradients of the inputs of image `blockIdx.x` for kernels of stride 1: the gradients of the
// convolution's outputs, with the zeros of those that are not maxima and with zeros around them, are in
// shared memory, and so are the weights as [ky, kx, output, channel].
template <class T>
__device__ __forceinline__ void backward_input_dense(
    ConvolutionShape shape, const float* weight, const T* argmax, const T* gradient, T* input_gradient) {
    extern __shared__ float shared[];
    uint32 reach = shape.kernel - 1, taps = shape.kernel * shape.kernel * shape.channels;
    uint32 len = output_height(shape) * output_width(shape) * shape.outputs;
    uint32 dense_height = shape.height + 2 * shape.padding + reach, row_len = padded_width(shape) + reach;
    float* dense = shared + taps * shape.outputs;
    argmax += (uint64)blockIdx.x * len;
    gradient += (uint64)blockIdx.x * len;
    input_gradient += (uint64)blockIdx.x * shape.height * shape.width * shape.channels;
    for (uint32 at = threadIdx.x; at < taps * shape.outputs; at += blockDim.x) {
        uint32 channel = at % shape.channels, out = at / shape.channels % shape.outputs;
        uint32 place = at / shape.channels / shape.outputs;
        shared[at] = weight[(out * shape.channels + channel) * shape.kernel * shape.kernel + place];
    }
    for (uint32 at = threadIdx.x; at < dense_height * row_len * shape.outputs; at += blockDim.x) {
        dense[at] = 0;
    }
    __syncthreads();
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        uint32 x, y = source_row(shape, argmax, at, &x);
        uint32 place = (y + reach) * row_len + x + reach;
        dense[place * shape.outputs + at % shape.outputs] = to_float(gradient[at]);
    }
    __syncthreads();
    uint32 groups = (shape.width + COLUMNS - 1) / COLUMNS;
    for (uint32 at = threadIdx.x; at < shape.height * groups * shape.channels; at += blockDim.x) {
        uint32 channel = at % shape.channels, x = at / shape.channels % groups * COLUMNS;
        uint32 y = at / shape.channels / groups;
        float sums[COLUMNS] = {0, 0, 0, 0};
        for (uint32 ky = 0; ky < shape.kernel; ky++) {
            uint32 place = (y + shape.padding + reach - ky) * row_len + x + shape.padding;
#pragma unroll 2
            for (uint32 out = 0; out < shape.outputs; out++) {
                float values[LARGEST_KERNEL + COLUMNS - 1];
#pragma unroll
                for (uint32 i = 0; i < LARGEST_KERNEL + COLUMNS - 1; i++) {
                    // the last group may reach beyond the last column
                    bool is_needed = i < COLUMNS + reach && x + i < shape.width + reach;
                    values[i] = is_needed ? dense[(place + i) * shape.outputs + out] : 0;
                }
#pragma unroll
                for (uint32 kx = 0; kx < LARGEST_KERNEL; kx++) {
                    if (kx < shape.kernel) {
                        uint32 tap = (ky * shape.kernel + kx) * shape.outputs + out;
                        float w = shared[tap * shape.channels + channel];
#pragma unroll
                        for (uint32 i = 0; i < COLUMNS; i++) {
                            sums[i] += w * values[i + reach - kx];
                        }
                    }
                }
            }
        }
        for (uint32 i = 0; i < COLUMNS; i++) {
            if (x + i < shape.width) {
                input_gradient[(y * shape.width + x + i) * shape.channels + channel] = from_float<T>(sums[i]);
            }
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
    extern __shared__ float shared[];
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
        for (uint32 at = threadIdx.x; at < taps * shape.outputs; at += blockDim.x) {
            uint32 channel = at % shape.channels, place = at / shape.channels;
            uint32 kx = place % shape.kernel, ky = place / shape.kernel % shape.kernel;
            shared[at] = weight[weight_index(shape, place / shape.kernel / shape.kernel, channel, ky, kx)];
        }
        stage(gradients, gradient, len);
        for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
            uint32 x, y = source_row(shape, argmax, at, &x);
            places[at] = y << 16 | x;
        }
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
                            : to_float(gradient[from]) * weight[weight_index(shape, out, channel, ky, kx)];
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
        uint32 width, int staged) {                                                                          \
        ConvolutionShape shape = known_shape(given);                                                         \
        staged ? backward_weight<T, true>(shape, input, argmax, gradient, partials, width)                   \
               : backward_weight<T, false>(shape, input, argmax, gradient, partials, width);                 \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(512) convolution_backward_input_##name(                     \
        ConvolutionShape given, const float* weight, const T* argmax, const T* gradient,                     \
        T* input_gradient, int staged) {                                                                     \
        ConvolutionShape shape = known_shape(given);                                                         \
        staged ? backward_input<T, true>(shape, weight, argmax, gradient, input_gradient)                    \
               : backward_input<T, false>(shape, weight, argmax, gradient, input_gradient);                  \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(512) convolution_backward_input_dense_##name(               \
        ConvolutionShape given, const float* weight, const T* argmax, const T* gradient,                     \
        T* input_gradient) {                                                                                 \
        backward_input_dense<T>(known_shape(given), weight, argmax, gradient, input_gradient);               \
    }

#define CONVOLUTIONS_OF(name) CONVOLUTIONS(name, name)

#ifdef FORMAT
CONVOLUTIONS_OF(FORMAT)
#else
FOR_BOTH(CONVOLUTIONS)
#endif
