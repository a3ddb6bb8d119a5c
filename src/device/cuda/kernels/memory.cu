// Kernels of the runtime: casts, values that travel as arguments, sums of received values and of
// partial sums.

extern "C" __global__ void cast_to_bf16(uint64 len, const float* from, bf16* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        into[at] = from_float<bf16>(from[at]);
    }
}

extern "C" __global__ void cast_to_f32(uint64 len, const bf16* from, float* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        into[at] = to_float(from[at]);
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

// Returns the sum of `mine`, which is term number `own`, and of `terms` others that are `stride`
// apart: by a binary tree over all terms, cut off at the last, as a binary counter counts.
template <class T>
__device__ __forceinline__ float sum_terms(
    float mine, const T* others, uint64 stride, uint32 terms, uint32 own) {
    float pending[MOST_LEVELS], sum = 0;
    for (uint32 term = 0; term <= terms; term++) {
        uint64 slot = term < own ? term : term - 1;
        sum = term == own ? mine : to_float(others[slot * stride]);
        bool is_kept = false;
#pragma unroll
        for (int level = 0; level < MOST_LEVELS; level++) {
            if (is_kept) {
            } else if (term >> level & 1) {
                sum = pending[level] + sum;
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
    uint64 len, T* values, const T* inbox, uint64 stride, uint32 terms, uint32 own) {
    bool is_aligned = ((uint64)values | (uint64)inbox) % sizeof(Four<T>) == 0;
    uint64 fours = terms == 1 && is_aligned ? len / 4 : 0;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> mine = ((Four<T>*)values)[four], other = ((const Four<T>*)inbox)[four];
        for (int lane = 0; lane < 4; lane++) {
            mine.at[lane] = from_float<T>(to_float(mine.at[lane]) + to_float(other.at[lane]));
        }
        ((Four<T>*)values)[four] = mine;
    }
    for (uint64 at = 4 * fours + thread_index(); at < len; at += num_threads()) {
        values[at] = from_float<T>(sum_terms<T>(to_float(values[at]), inbox + at, stride, terms, own));
    }
}

#define ADDITIONS(T, name)                                                                                   \
    extern "C" __global__ void add_terms_##name(                                                             \
        uint64 len, T* values, const T* inbox, uint64 stride, uint32 terms, uint32 own) {                    \
        add_terms<T>(len, values, inbox, stride, terms, own);                                                \
    }

FOR_BOTH(ADDITIONS)
