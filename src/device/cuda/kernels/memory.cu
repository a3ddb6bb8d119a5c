// Kernels of the runtime: casts, values that travel as arguments, sums of received values and of
// partial sums.

template <class From, class Into>
__device__ __forceinline__ void cast(uint64 len, const From* __restrict__ from, Into* __restrict__ into) {
    over_values<8>(len, (uint64)from | (uint64)into, [&](uint64 at, auto count) {
        Several<From, count.value> values = load<count.value>(from + at);
        Several<Into, count.value> results;
        for (uint32 i = 0; i < count.value; i++) {
            results.at[i] = from_float<Into>(to_float(values.at[i]));
        }
        store(into + at, results);
    });
}

extern "C" __global__ void cast_to_bf16(uint64 len, const float* from, bf16* into) {
    cast(len, from, into);
}

extern "C" __global__ void cast_to_f32(uint64 len, const bf16* from, float* into) {
    cast(len, from, into);
}

// Copies a few values to the host's memory.
extern "C" __global__ void report(uint32 len, const float* from, volatile float* into) {
    if (threadIdx.x < len) {
        into[threadIdx.x] = from[threadIdx.x];
    }
}

// total[i] = Σ sums[row][i], added to what is there if `accumulate`. Blocks are 32 elements wide
// and 8 rows high.
extern "C" __global__ void add_partial_sums(
    uint32 num_rows, uint32 len, const float* sums, float* total, int accumulate) {
    __shared__ float tile[8][33];
    uint32 at = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (at < len) {
        for (uint32 row = threadIdx.y; row < num_rows; row += 8) {
            sum += sums[(uint64)row * len + at];
        }
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && at < len) {
        float all = accumulate ? total[at] : 0;
        for (int row = 0; row < 8; row++) {
            all += tile[row][threadIdx.x];
        }
        total[at] = all;
    }
}

// Values that travel as arguments.
struct Few {
    float at[16];
};

struct Some {
    float at[960];
};

extern "C" __global__ void store_few(Few values, uint32 len, float* into) {
    if (threadIdx.x < len) {
        into[threadIdx.x] = values.at[threadIdx.x];
    }
}

extern "C" __global__ void store_some(const __grid_constant__ Some values, uint32 len, float* into) {
    if (thread_index() < len) {
        into[thread_index()] = values.at[thread_index()];
    }
}

// The logarithm of the most terms of a sum.
const int MOST_LEVELS = 16;

// Returns the sums of `mine`, which are term number `own`, and of `terms` others that are `stride` apart: by
// a binary tree over all terms, cut off at the last, as a binary counter counts.
template <uint32 N, class T>
__device__ __forceinline__ Several<float, N> sum_terms(
    const Several<float, N>& mine, const T* others, uint64 stride, uint32 terms, uint32 own) {
    Several<float, N> pending[MOST_LEVELS], sum = mine;
    for (uint32 term = 0; term <= terms; term++) {
        uint64 slot = term < own ? term : term - 1;
        if (term == own) {
            sum = mine;
        } else {
            Several<T, N> values = load<N>(others + slot * stride);
            for (uint32 i = 0; i < N; i++) {
                sum.at[i] = to_float(values.at[i]);
            }
        }
        bool is_kept = false;
#pragma unroll
        for (int level = 0; level < MOST_LEVELS; level++) {
            if (is_kept) {
            } else if (term >> level & 1) {
                for (uint32 i = 0; i < N; i++) {
                    sum.at[i] = pending[level].at[i] + sum.at[i];
                }
            } else if (term < terms) {
                pending[level] = sum;
                is_kept = true;
            }
        }
    }
    return sum;
}

// Adds the received terms inbox[term][i] to values[i].
template <class T>
__device__ __forceinline__ void add_terms(
    uint64 len, T* __restrict__ values, const T* __restrict__ inbox, uint64 stride, uint32 terms,
    uint32 own) {
    over_values<4>(len, (uint64)values | (uint64)inbox | 4 * stride, [&](uint64 at, auto count) {
        const uint32 N = count.value;
        Several<T, N> some = load<N>(values + at);
        Several<float, N> sums;
        for (uint32 i = 0; i < N; i++) {
            sums.at[i] = to_float(some.at[i]);
        }
        sums = sum_terms<N>(sums, inbox + at, stride, terms, own);
        for (uint32 i = 0; i < N; i++) {
            some.at[i] = from_float<T>(sums.at[i]);
        }
        store(values + at, some);
    });
}

#define ADDITIONS(T, name)                                                                                   \
    extern "C" __global__ void add_terms_##name(                                                             \
        uint64 len, T* values, const T* inbox, uint64 stride, uint32 terms, uint32 own) {                    \
        add_terms<T>(len, values, inbox, stride, terms, own);                                                \
    }

FOR_BOTH(ADDITIONS)
