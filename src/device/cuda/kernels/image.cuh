// The shape of a convolution with pooling, and images in shared memory.

struct ConvolutionShape {
    uint32 rows, channels, height, width, outputs, kernel, stride, padding, window, relu;
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
    for (uint32 at = threadIdx.x; at < padded_len(shape); at += blockDim.x) {
        into[at] = pixel(shape, image, at);
    }
}

// Returns the index of a weight in PyTorch's order [output, channel, ky, kx].
__device__ __forceinline__ uint32 weight_index(
    const ConvolutionShape& shape, uint32 output, uint32 channel, uint32 ky, uint32 kx) {
    return ((output * shape.channels + channel) * shape.kernel + ky) * shape.kernel + kx;
}

template <class T>
__device__ __forceinline__ void stage(float* into, const T* from, uint32 len) {
    for (uint32 at = threadIdx.x; at < len; at += blockDim.x) {
        into[at] = to_float(from[at]);
    }
}

// Returns the row, and the column, of the image with its zeros where the kernel begins for the output of
// the convolution that pooled output `at` is the maximum of.
template <class T>
__device__ __forceinline__ uint32 source_row(
    const ConvolutionShape& shape, const T* argmax, uint32 at, uint32* column) {
    uint32 x = at / shape.outputs % output_width(shape), y = at / shape.outputs / output_width(shape);
    uint32 place = shape.window > 1 ? get_number(argmax[at]) : 0;
    *column = (x * shape.window + place % 2) * shape.stride;
    return (y * shape.window + place / 2) * shape.stride;
}
