// The gradients of the weights and biases of convolutions.

#include "image.cuh"

// Sums the gradients `gradient_of(at)` of an image over its places in `sums`, one for each output. Unless the
// image `is_first`, they are added to what is there.
template <class Gradient>
__device__ __forceinline__ void add_outputs(
    const ConvolutionShape& shape, float* sums, bool is_first, Gradient gradient_of) {
    uint32 len = output_height(shape) * output_width(shape) * shape.outputs, lane = threadIdx.x % 32;
    for (uint32 out = threadIdx.x / 32; out < shape.outputs; out += blockDim.x / 32) {
        float sum = 0;
        for (uint32 at = lane * shape.outputs + out; at < len; at += 32 * shape.outputs) {
            sum += gradient_of(at);
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            sums[out] = is_first ? sum : sums[out] + sum;
        }
    }
}

// The most weights of a thread.
const uint32 MOST_WEIGHTS = 5;

// Sums the gradients of weights over the images `blockIdx.x`, `blockIdx.x + gridDim.x`, …, into row
// `blockIdx.x` of `partials`, and those of the biases behind them, if the layer has biases. `lanes` threads
// share the weights of one output, and take every `lanes`-th. `width` threads of a block have the weights of
// as many threads of all, from `blockIdx.y` · `width` on; further threads are further slices, which share the
// places of an image. With `STAGED`, as slices need it, an image and its gradients are in shared memory.
template <class T, bool STAGED>
__device__ __forceinline__ void backward_weight(
    ConvolutionShape shape, const T* input, const T* argmax, const T* gradient, float* partials,
    uint32 width, bool has_bias) {
    extern __shared__ __align__(16) float shared[];
    uint32 image_len = shape.height * shape.width * shape.channels;
    uint32 num_places = output_height(shape) * output_width(shape), len = num_places * shape.outputs;
    uint32 taps = shape.kernel * shape.kernel * shape.channels, num_weights = taps * shape.outputs;
    uint32 lanes = (taps + MOST_WEIGHTS - 1) / MOST_WEIGHTS, each = (taps + lanes - 1) / lanes;
    uint32 first = blockIdx.y * width, slice = threadIdx.x / width, slices = blockDim.x / width;
    uint32 row_len = padded_width(shape) * shape.channels, run = shape.kernel * shape.channels;
    Placed* gradients = (Placed*)(shared + (padded_len(shape) + 1) / 2 * 2);
    float* of_slices = (float*)(gradients + len);
    partials += (uint64)blockIdx.x * (num_weights + (has_bias ? shape.outputs : 0));
    float sums[MOST_WEIGHTS];
    // a thread beyond the last has the weights of the last, and stores nothing
    uint32 own = min(first + threadIdx.x % width, lanes * shape.outputs - 1), out = own / lanes;
    uint32 offsets[MOST_WEIGHTS];
#pragma unroll
    for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
        uint32 tap = min(own % lanes + i * lanes, taps - 1);
        offsets[i] = tap / run * row_len + tap % run;
        sums[i] = 0;
    }
    for (uint32 row = blockIdx.x; row < shape.rows; row += gridDim.x) {
        const T* image = input + (uint64)row * image_len;
        const T* image_gradient = gradient + (uint64)row * len;
        const T* image_argmax = argmax + (uint64)row * len;
        auto read = [&](uint32 at) {
            uint32 x, y = source_row(shape, image_argmax, at, &x);
            float value = taken_gradient(shape, image_argmax, image_gradient, at);
            return Placed{y * row_len + x * shape.channels, value};
        };
        if (STAGED) {
            __syncthreads();
            stage_image(shape, shared, image);
            in_batches(len, read, [&](uint32 at, Placed found) { gradients[at] = found; });
            __syncthreads();
        }
        auto found = [&](uint32 at) { return STAGED ? gradients[at] : read(at); };
        if (has_bias && blockIdx.y == 0) {
            auto gradient_of = [&](uint32 at) { return found(at).value; };
            add_outputs(shape, partials + num_weights, row == blockIdx.x, gradient_of);
        }
#pragma unroll 4
        for (uint32 place = slice; place < num_places; place += slices) {
            Placed g = found(place * shape.outputs + out);
#pragma unroll
            for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
                if (i < each) {
                    uint32 from = g.place + offsets[i];
                    sums[i] += g.value * (STAGED ? shared[from] : pixel(shape, image, from));
                }
            }
        }
    }
    auto store_weight = [&](uint32 number, uint32 i, float sum) {
        uint32 tap = number % lanes + i * lanes;
        if (number < lanes * shape.outputs && tap < taps) {
            uint32 kx = tap / shape.channels % shape.kernel, ky = tap / run;
            partials[weight_index(shape, number / lanes, tap % shape.channels, ky, kx)] = sum;
        }
    };
    if (slices == 1) {
#pragma unroll
        for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
            store_weight(first + threadIdx.x, i, sums[i]);
        }
        return;
    }
#pragma unroll
    for (uint32 i = 0; i < MOST_WEIGHTS; i++) {
        of_slices[i * blockDim.x + threadIdx.x] = sums[i];
    }
    __syncthreads();
    for (uint32 at = threadIdx.x; at < each * width; at += blockDim.x) {
        uint32 i = at / width, column = at % width;
        float sum = 0;
        for (uint32 other = 0; other < slices; other++) {
            sum += of_slices[i * blockDim.x + other * width + column];
        }
        store_weight(first + column, i, sum);
    }
}
