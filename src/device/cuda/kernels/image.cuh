// The shape of a convolution with pooling, with images and weights in shared memory.

struct ConvolutionShape {
    uint32 rows, channels, height, width, outputs, kernel, stride, padding, window, flattens, relu;
};

__device__ __forceinline__ uint32 output_height(const ConvolutionShape& shape) {
    return ((shape.height + 2 * shape.padding - shape.kernel) / shape.stride + 1) / shape.window;
}

__device__ __forceinline__ uint32 output_width(const ConvolutionShape& shape) {
    return ((shape.width + 2 * shape.padding - shape.kernel) / shape.stride + 1) / shape.window;
}

__device__ __forceinline__ uint32 padded_width(const ConvolutionShape& shape) {
    return shape.width + 2 * shape.padding;
}

__device__ __forceinline__ uint32 padded_len(const ConvolutionShape& shape) {
    return (shape.height + 2 * shape.padding) * padded_width(shape) * shape.channels;
}

// A value, and its place in an image.
struct __align__(8) Placed {
    uint32 place;
    float value;
};

// Loads of a thread that are under way at a time.
const uint32 BATCH = 8;

// Calls `write(at, read(at))` for the numbers below `len`, which the threads of a block share. A batch of
// values is read before the first of them is written.
template <class Read, class Write>
__device__ __forceinline__ void in_batches(uint32 len, Read read, Write write) {
    for (uint32 start = threadIdx.x; start < len; start += BATCH * blockDim.x) {
        decltype(read(0u)) values[BATCH];
#pragma unroll
        for (uint32 i = 0; i < BATCH; i++) {
            uint32 at = start + i * blockDim.x;
            if (at < len) {
                values[i] = read(at);
            }
        }
#pragma unroll
        for (uint32 i = 0; i < BATCH; i++) {
            uint32 at = start + i * blockDim.x;
            if (at < len) {
                write(at, values[i]);
            }
        }
    }
}

// Returns element `at` of an image with zeros around it.
template <class T>
__device__ __forceinline__ float pixel(const ConvolutionShape& shape, const T* image, uint32 at) {
    if (shape.padding == 0) {
        return to_float(image[at]);
    }
    uint32 channel = at % shape.channels, place = at / shape.channels;
    // unsigned: what is above or left of the image is out of range as well
    uint32 y = place / padded_width(shape) - shape.padding, x = place % padded_width(shape) - shape.padding;
    bool is_inside = y < shape.height && x < shape.width;
    return is_inside ? to_float(image[(y * shape.width + x) * shape.channels + channel]) : 0;
}

template <class T>
__device__ __forceinline__ void stage_image(const ConvolutionShape& shape, float* into, const T* image) {
    in_batches(
        padded_len(shape), [&](uint32 at) { return pixel(shape, image, at); },
        [&](uint32 at, float value) { into[at] = value; });
}

// Returns the index of a weight in PyTorch's order [output, channel, ky, kx].
__device__ __forceinline__ uint32 weight_index(
    const ConvolutionShape& shape, uint32 output, uint32 channel, uint32 ky, uint32 kx) {
    return ((output * shape.channels + channel) * shape.kernel + ky) * shape.kernel + kx;
}

// Stands in `argmax` for the place of an output that ReLU set to 0, which takes no gradient.
const uint32 NO_PLACE = 4;

// Returns the place of pooled output `at` in its image, or among features, channels first.
__device__ __forceinline__ uint32 output_place(const ConvolutionShape& shape, uint32 at) {
    uint32 num_places = output_height(shape) * output_width(shape);
    return shape.flattens ? at % shape.outputs * num_places + at / shape.outputs : at;
}

// Returns the gradient of pooled output `at` before ReLU.
template <class T>
__device__ __forceinline__ float taken_gradient(
    const ConvolutionShape& shape, const T* argmax, const T* gradient, uint32 at) {
    bool is_taken = shape.window == 1 || get_number(argmax[at]) != NO_PLACE;
    return is_taken ? to_float(gradient[output_place(shape, at)]) : 0;
}

// Returns the row, and the column, of the image with its zeros where the kernel begins for the output of
// the convolution that pooled output `at` is the maximum of.
template <class T>
__device__ __forceinline__ uint32 source_row(
    const ConvolutionShape& shape, const T* argmax, uint32 at, uint32* column) {
    uint32 x = at / shape.outputs % output_width(shape), y = at / shape.outputs / output_width(shape);
    uint32 place = shape.window > 1 ? get_number(argmax[at]) % NO_PLACE : 0;
    *column = (x * shape.window + place % 2) * shape.stride;
    return (y * shape.window + place / 2) * shape.stride;
}

// Outputs that a thread computes, or reads the gradients of, at once.
const uint32 OUTPUTS = 4;

// Returns the number of outputs with room for whole groups.
__device__ __forceinline__ uint32 padded_outputs(const ConvolutionShape& shape) {
    return (shape.outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
}

// Copies the weights to `into`, as [ky, kx, channel, output] with room for whole groups of outputs, so that a
// thread reads those of a group at once.
__device__ __forceinline__ void stage_weights(
    const ConvolutionShape& shape, float* into, const float* weight) {
    uint32 area = shape.kernel * shape.kernel, depth = padded_outputs(shape);
    auto write = [&](uint32 at, float value) {
        uint32 place = at % area, channel = at / area % shape.channels, out = at / area / shape.channels;
        into[(place * shape.channels + channel) * depth + out] = value;
    };
    in_batches(area * shape.channels * shape.outputs, [&](uint32 at) { return weight[at]; }, write);
}
