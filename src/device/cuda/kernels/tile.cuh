// Products of matrices in shared memory, by warps: on tensor cores in bf16, where there are some.

// The rows of a warp.
const uint32 WARP_ROWS = 16;

// The distance of rows of `WIDTH` values in shared memory: threads of a warp read 8 rows at a time, which
// begin in different banks.
template <class T, uint32 WIDTH>
constexpr uint32 STRIDE = WIDTH + 16 / sizeof(T);

// A matrix of 16 rows in the registers of a warp, as tensor cores leave it: of each 8 columns, lane l has
// columns l % 4 · 2 and the next of row l / 4 (values 0 and 1) and of row l / 4 + 8 (values 2 and 3).
template <uint32 COLUMNS>
struct WarpMatrix {
    float at[COLUMNS / 8][4];
};

__device__ __forceinline__ uint32 lane_row(uint32 half) {
    return threadIdx.x % 32 / 4 + 8 * half;
}

__device__ __forceinline__ uint32 lane_column(uint32 block) {
    return 8 * block + threadIdx.x % 4 * 2;
}

// Two values that are neighbours in memory.
__device__ __forceinline__ uint32 pair(const bf16* values) {
    return *(const uint32*)values;
}

__device__ __forceinline__ uint32 pair(bf16 first, bf16 second) {
    return first.bits | (uint32)second.bits << 16;
}

// sums += left · right for 16 × 16 and 16 × 8 values of a warp: `mma.m16n8k16` of the PTX instruction set.
__device__ __forceinline__ void multiply_block(float* sums, const uint32* left, const uint32* right) {
#if !defined(PHALANX_EMULATOR) && __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
#else
    uint32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (uint32 depth = 0; depth < 16; depth += 2) {
        uint32 part = depth / 8, owner = depth % 8 / 2, column = lane % 4 * 2;
        // both values of a pair: the first of them is in the lower half
        uint32 rows[2], columns[2];
        for (uint32 at = 0; at < 2; at++) {
            rows[at] = __shfl_sync(0xffffffffu, left[2 * part + at], lane / 4 * 4 + owner);
            columns[at] = __shfl_sync(0xffffffffu, right[part], (column + at) * 4 + owner);
        }
        for (uint32 at = 0; at < 4; at++) {
            uint32 a = rows[at / 2], b = columns[at % 2];
            sums[at] = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sums[at]);
            sums[at] = fmaf(__uint_as_float(a & 0xffff0000), __uint_as_float(b & 0xffff0000), sums[at]);
        }
    }
#endif
}

// Loads 16 × 16 values of the left factor, whose rows are `stride` apart.
__device__ __forceinline__ void load_left(uint32* left, const bf16* from, uint32 stride) {
    const bf16* upper = from + lane_row(0) * stride + lane_column(0);
    const bf16* lower = from + lane_row(1) * stride + lane_column(0);
    left[0] = pair(upper);
    left[1] = pair(lower);
    left[2] = pair(upper + 8);
    left[3] = pair(lower + 8);
}

// sums += left · rightᵀ: left is [16, DEPTH], right [COLUMNS, DEPTH], with rows `stride` apart.
template <uint32 COLUMNS, uint32 DEPTH>
__device__ __forceinline__ void multiply_transposed(
    WarpMatrix<COLUMNS>& sums, const bf16* left, const bf16* right, uint32 stride) {
#pragma unroll
    for (uint32 depth = 0; depth < DEPTH; depth += 16) {
        uint32 factors[4];
        load_left(factors, left + depth, stride);
#pragma unroll
        for (uint32 block = 0; block < COLUMNS / 8; block++) {
            const bf16* row = right + (8 * block + threadIdx.x % 32 / 4) * stride + depth + lane_column(0);
            uint32 others[2] = {pair(row), pair(row + 8)};
            multiply_block(sums.at[block], factors, others);
        }
    }
}

template <uint32 COLUMNS, uint32 DEPTH>
__device__ __forceinline__ void multiply_transposed(
    WarpMatrix<COLUMNS>& sums, const float* left, const float* right, uint32 stride) {
#pragma unroll 2
    for (uint32 depth = 0; depth < DEPTH; depth += 4) {
        Four<float> upper = *(const Four<float>*)(left + lane_row(0) * stride + depth);
        Four<float> lower = *(const Four<float>*)(left + lane_row(1) * stride + depth);
#pragma unroll
        for (uint32 block = 0; block < COLUMNS / 8; block++) {
#pragma unroll
            for (uint32 next = 0; next < 2; next++) {
                const float* row = right + (lane_column(block) + next) * stride + depth;
                Four<float> other = *(const Four<float>*)row;
                for (uint32 at = 0; at < 4; at++) {
                    sums.at[block][next] += upper.at[at] * other.at[at];
                    sums.at[block][2 + next] += lower.at[at] * other.at[at];
                }
            }
        }
    }
}

// sums += left · right: left is [16, DEPTH], right [DEPTH, COLUMNS].
template <uint32 COLUMNS, uint32 DEPTH>
__device__ __forceinline__ void multiply(
    WarpMatrix<COLUMNS>& sums, const bf16* left, uint32 left_stride, const bf16* right, uint32 stride) {
#pragma unroll
    for (uint32 depth = 0; depth < DEPTH; depth += 16) {
        uint32 factors[4];
        load_left(factors, left + depth, left_stride);
        const bf16* first = right + (depth + lane_column(0)) * stride + threadIdx.x % 32 / 4;
#pragma unroll
        for (uint32 block = 0; block < COLUMNS / 8; block++) {
            const bf16* column = first + 8 * block;
            uint32 others[2] = {
                pair(column[0], column[stride]), pair(column[8 * stride], column[9 * stride])};
            multiply_block(sums.at[block], factors, others);
        }
    }
}

template <uint32 COLUMNS, uint32 DEPTH>
__device__ __forceinline__ void multiply(
    WarpMatrix<COLUMNS>& sums, const float* left, uint32 left_stride, const float* right, uint32 stride) {
#pragma unroll 2
    for (uint32 depth = 0; depth < DEPTH; depth++) {
        float upper = left[lane_row(0) * left_stride + depth];
        float lower = left[lane_row(1) * left_stride + depth];
#pragma unroll
        for (uint32 block = 0; block < COLUMNS / 8; block++) {
            float2 others = *(const float2*)(right + depth * stride + lane_column(block));
            sums.at[block][0] += upper * others.x;
            sums.at[block][1] += upper * others.y;
            sums.at[block][2] += lower * others.x;
            sums.at[block][3] += lower * others.y;
        }
    }
}

// Copies `num` rows of `width` values, `from_stride` apart, to a tile of `rows` rows; the rest becomes 0.
template <class T, uint32 WIDTH>
__device__ __forceinline__ void load_tile(
    T* tile, uint32 rows, uint32 num, uint32 width, const T* from, uint64 from_stride) {
    const uint32 EACH = 16 / sizeof(T), COLUMNS = WIDTH / EACH;
    bool is_aligned = ((uint64)from | from_stride * sizeof(T) | width * sizeof(T)) % 16 == 0;
    for (uint32 at = threadIdx.x; at < rows * COLUMNS; at += blockDim.x) {
        uint32 row = at / COLUMNS, column = at % COLUMNS * EACH;
        const T* place = from + row * from_stride + column;
        T* into = tile + row * STRIDE<T, WIDTH> + column;
        if (is_aligned && row < num && column < width) {
            *(uint4*)into = *(const uint4*)place;
        } else {
            for (uint32 each = 0; each < EACH; each++) {
                into[each] = row < num && column + each < width ? place[each] : from_float<T>(0);
            }
        }
    }
}

// Writes the rows of a warp that are below `num`, times a factor for each half of them.
template <class T, uint32 WIDTH>
__device__ __forceinline__ void store_rows(
    const WarpMatrix<WIDTH>& values, uint32 num, uint32 width, const float* factors, T* into, uint64 stride) {
#pragma unroll
    for (uint32 block = 0; block < WIDTH / 8; block++) {
#pragma unroll
        for (uint32 at = 0; at < 4; at++) {
            uint32 row = lane_row(at / 2), column = lane_column(block) + at % 2;
            if (row < num && column < width) {
                into[row * stride + column] = from_float<T>(values.at[block][at] * factors[at / 2]);
            }
        }
    }
}

// Multiplies each half of the rows by a factor.
template <uint32 COLUMNS>
__device__ __forceinline__ void scale_rows(WarpMatrix<COLUMNS>& values, const float* factors) {
#pragma unroll
    for (uint32 at = 0; at < COLUMNS / 2; at++) {
        values.at[at / 4][at % 4] *= factors[at % 4 / 2];
    }
}

// Writes a matrix to the shared memory of its warp.
template <class T, uint32 COLUMNS>
__device__ __forceinline__ void store_warp(const WarpMatrix<COLUMNS>& values, T* into) {
    const float ones[2] = {1, 1};
    __syncwarp();
    store_rows<T, COLUMNS>(values, WARP_ROWS, COLUMNS, ones, into, STRIDE<T, COLUMNS>);
    __syncwarp();
}
