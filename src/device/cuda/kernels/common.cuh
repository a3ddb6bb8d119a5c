// Declarations that all kernels share. The text is put before each file, because NVRTC finds no
// headers.
//
// Arrays are dense and row-major. `T` is the format of activations: `float`, or `bf16` with
// products in bf16. Sums are formed in float and in an order that does not depend on the order in
// which blocks run, so that a repeated step gives the same bits.

typedef float f32;
typedef unsigned int uint32;
typedef unsigned long long uint64;

// The upper half of a float.
struct bf16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) {
    return value;
}

__device__ __forceinline__ float to_float(bf16 value) {
    return __uint_as_float((uint32)value.bits << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
    uint32 bits = __float_as_uint(value);
    uint32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    bf16 result;
    result.bits = value != value ? 0x7fff : (unsigned short)(rounded >> 16);
    return result;
}

// An integer stored in place of an activation: `argmax`.
__device__ __forceinline__ void put_number(float* place, uint32 number) {
    *place = __uint_as_float(number);
}

__device__ __forceinline__ void put_number(bf16* place, uint32 number) {
    place->bits = (unsigned short)number;
}

__device__ __forceinline__ uint32 get_number(float place) {
    return __float_as_uint(place);
}

__device__ __forceinline__ uint32 get_number(bf16 place) {
    return place.bits;
}

// Values that are read and written at once.
template <class T, uint32 N>
struct __align__(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Several {
    T at[N];
};

// 16 bytes if they are floats.
template <class T>
using Four = Several<T, 4>;

template <uint32 N, class T>
__device__ __forceinline__ Several<T, N> load(const T* from) {
    return *(const Several<T, N>*)from;
}

template <uint32 N, class T>
__device__ __forceinline__ void store(T* into, const Several<T, N>& values) {
    *(Several<T, N>*)into = values;
}

template <uint32 N>
struct Count {
    static const uint32 value = N;
};

__device__ __forceinline__ uint64 thread_index() {
    return (uint64)blockIdx.x * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ uint64 num_threads() {
    return (uint64)gridDim.x * blockDim.x;
}

// Calls `body(at, Count<N>)` for each N of `len` values, and `body(at, Count<1>)` for the rest, or for all
// unless they can be taken N at a time: `alignment` holds the bits of all addresses, and of numbers of values
// that N must divide, times 16 / N.
template <uint32 N, class Body>
__device__ __forceinline__ void over_values(uint64 len, uint64 alignment, Body body) {
    uint64 groups = alignment % 16 == 0 ? len / N : 0;
    for (uint64 group = thread_index(); group < groups; group += num_threads()) {
        body(N * group, Count<N>());
    }
    for (uint64 at = N * groups + thread_index(); at < len; at += num_threads()) {
        body(at, Count<1>());
    }
}

__device__ __forceinline__ float warp_sum(float value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// Returns the sum over a block of whole warps in thread 0.
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[32];
    value = warp_sum(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float total = 0;
    if (threadIdx.x == 0) {
        for (int warp = 0; warp < blockDim.x / 32; warp++) {
            total += sums[warp];
        }
    }
    return total;
}

// Returns true in the last of `num` blocks to call this, which sees what all of them have written before.
// `blocks_done` is 0 before and after.
__device__ __forceinline__ bool is_last_block(uint32* blocks_done, uint32 num) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(blocks_done, 1u) == num - 1;
        if (is_last) {
            *blocks_done = 0;
            __threadfence();
        }
    }
    __syncthreads();
    return is_last;
}

// Adds `factor` times the sum of each of `values` over the whole grid to `targets`: every block stores its
// sums in `partials`, and the last block to do so adds them in order.
template <uint32 N>
__device__ __forceinline__ void grid_sums(
    const float (&values)[N], float factor, float* partials, uint32* blocks_done, float* targets) {
    for (uint32 i = 0; i < N; i++) {
        float sum = block_sum(values[i]);
        if (threadIdx.x == 0) {
            partials[i * gridDim.x + blockIdx.x] = sum;
        }
    }
    if (!is_last_block(blocks_done, gridDim.x)) {
        return;
    }
    for (uint32 i = 0; i < N; i++) {
        float part = 0;
        for (uint32 block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
            part += *(volatile float*)&partials[i * gridDim.x + block];
        }
        float total = block_sum(part);
        if (threadIdx.x == 0) {
            targets[i] += factor * total;
        }
    }
}

__device__ __forceinline__ void grid_sum(
    float value, float factor, float* partials, uint32* blocks_done, float* target) {
    const float values[1] = {value};
    grid_sums(values, factor, partials, blocks_done, target);
}

// Defines kernels for both formats of activations.
#define FOR_BOTH(define) define(float, f32) define(bf16, bf16)
