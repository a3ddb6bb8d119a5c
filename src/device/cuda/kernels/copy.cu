// Fills, copies and sums: whole arrays, blocks of matrices, transposition, rows of a table.

template <class T>
__device__ __forceinline__ void copy_rows(
    uint32 rows, uint32 columns, uint32 from_stride, uint32 into_stride, const T* __restrict__ from,
    T* __restrict__ into) {
    uint64 alignment = (uint64)from | (uint64)into | 2 * (columns | from_stride | into_stride);
    over_values<8>((uint64)rows * columns, alignment, [&](uint64 at, auto count) {
        uint64 row = at / columns, column = at % columns;
        const T* place = from + row * from_stride + column;
        store(into + row * into_stride + column, load<count.value>(place));
    });
}

// Moves tiles of `SIDE` × `SIDE` values through shared memory, N at a time. The row of a tile is
// four bytes longer, so that threads of a warp share a bank at most two at a time.
template <uint32 SIDE, uint32 N, class T>
__device__ __forceinline__ void transpose_tiles(
    uint64 len, uint32 rows, uint32 columns, const T* __restrict__ input, T* __restrict__ output) {
    __shared__ T tile[SIDE][SIDE + 4 / sizeof(T)];
    const uint32 GROUPS = SIDE / N;
    uint32 high = (rows + SIDE - 1) / SIDE, wide = (columns + SIDE - 1) / SIDE, size = rows * columns;
    for (uint64 at = blockIdx.x; at < len / size * high * wide; at += gridDim.x) {
        uint64 matrix = at / (high * wide) * size;
        uint32 top = at / wide % high * SIDE, left = at % wide * SIDE;
        __syncthreads();
        for (uint32 group = threadIdx.x; group < SIDE * GROUPS; group += blockDim.x) {
            uint32 down = group / GROUPS, right = group % GROUPS * N;
            if (top + down < rows && left + right < columns) {
                Several<T, N> values = load<N>(input + matrix + (top + down) * columns + left + right);
                for (uint32 i = 0; i < N; i++) {
                    tile[down][right + i] = values.at[i];
                }
            }
        }
        __syncthreads();
        for (uint32 group = threadIdx.x; group < SIDE * GROUPS; group += blockDim.x) {
            uint32 right = group / GROUPS, down = group % GROUPS * N;
            if (left + right < columns && top + down < rows) {
                Several<T, N> values;
                for (uint32 i = 0; i < N; i++) {
                    values.at[i] = tile[down + i][right];
                }
                store(output + matrix + (left + right) * rows + top + down, values);
            }
        }
    }
}

// Moves 16 bytes at a time where they are of one row before and after, in tiles of 128 bytes of a row.
template <class T>
__device__ __forceinline__ void transpose_matrices(
    uint64 len, uint32 rows, uint32 columns, const T* __restrict__ input, T* __restrict__ output) {
    const uint32 EACH = 16 / sizeof(T);
    if (((uint64)input | (uint64)output | sizeof(T) * (rows | columns)) % 16 == 0) {
        transpose_tiles<8 * EACH, EACH>(len, rows, columns, input, output);
    } else {
        transpose_tiles<32, 1>(len, rows, columns, input, output);
    }
}

// Copies row `numbers[i]` of each table to row i of its destination; the numbers are the bits of the floats.
template <class T>
__device__ __forceinline__ void gather(
    uint32 rows, const float* __restrict__ numbers, uint32 columns, const float* __restrict__ table,
    T* __restrict__ into, uint32 others, const float* __restrict__ other_table,
    float* __restrict__ other_into) {
    // from the last thread on, as the first has the first table's rows
    uint64 other_len = (uint64)rows * others;
    for (uint64 at = num_threads() - 1 - thread_index(); at < other_len; at += num_threads()) {
        uint64 row = __float_as_uint(numbers[at / others]);
        other_into[at] = other_table[row * others + at % others];
    }
    uint64 len = (uint64)rows * columns;
    over_values<8>(len, (uint64)table | (uint64)into | 2 * columns, [&](uint64 at, auto count) {
        uint64 row = __float_as_uint(numbers[at / columns]);
        Several<float, count.value> values = load<count.value>(table + row * columns + at % columns);
        Several<T, count.value> results;
        for (uint32 i = 0; i < count.value; i++) {
            results.at[i] = from_float<T>(values.at[i]);
        }
        store(into + at, results);
    });
}

template <class T>
__device__ __forceinline__ void fill_values(uint64 len, float value, T* into) {
    over_values<8>(len, (uint64)into, [&](uint64 at, auto count) {
        Several<T, count.value> values;
        for (uint32 i = 0; i < count.value; i++) {
            values.at[i] = from_float<T>(value);
        }
        store(into + at, values);
    });
}

template <class T>
__device__ __forceinline__ void add_values(uint64 len, const T* __restrict__ from, T* __restrict__ into) {
    over_values<8>(len, (uint64)from | (uint64)into, [&](uint64 at, auto count) {
        Several<T, count.value> sums = load<count.value>(into + at), terms = load<count.value>(from + at);
        for (uint32 i = 0; i < count.value; i++) {
            sums.at[i] = from_float<T>(to_float(sums.at[i]) + to_float(terms.at[i]));
        }
        store(into + at, sums);
    });
}

// output = first + second; then ReLU, if there is to be one.
template <class T>
__device__ __forceinline__ void sum_values(
    uint64 len, const T* __restrict__ first, const T* __restrict__ second, int relu, T* __restrict__ output) {
    over_values<8>(len, (uint64)first | (uint64)second | (uint64)output, [&](uint64 at, auto count) {
        Several<T, count.value> sums = load<count.value>(first + at), terms = load<count.value>(second + at);
        for (uint32 i = 0; i < count.value; i++) {
            float sum = to_float(sums.at[i]) + to_float(terms.at[i]);
            sums.at[i] = from_float<T>(relu && sum < 0 ? 0 : sum);
        }
        store(output + at, sums);
    });
}

#define COPIES(T, name)                                                                                      \
    extern "C" __global__ void fill_##name(uint64 len, float value, T* into) {                               \
        fill_values<T>(len, value, into);                                                                    \
    }                                                                                                        \
    extern "C" __global__ void add_##name(uint64 len, const T* from, T* into) {                              \
        add_values<T>(len, from, into);                                                                      \
    }                                                                                                        \
    extern "C" __global__ void sum_##name(                                                                   \
        uint64 len, const T* first, const T* second, int relu, T* output) {                                  \
        sum_values<T>(len, first, second, relu, output);                                                     \
    }                                                                                                        \
    extern "C" __global__ void copy_block_##name(                                                            \
        uint32 rows, uint32 columns, uint32 from_stride, uint32 into_stride, const T* from, T* into) {       \
        copy_rows<T>(rows, columns, from_stride, into_stride, from, into);                                   \
    }                                                                                                        \
    extern "C" __global__ void transpose_each_##name(                                                        \
        uint64 len, uint32 rows, uint32 columns, const T* input, T* output) {                                \
        transpose_matrices<T>(len, rows, columns, input, output);                                            \
    }                                                                                                        \
    extern "C" __global__ void gather_rows_##name(                                                           \
        uint32 rows, const float* numbers, uint32 columns, const float* table, T* into, uint32 others,       \
        const float* other_table, float* other_into) {                                                       \
        gather<T>(rows, numbers, columns, table, into, others, other_table, other_into);                     \
    }

FOR_BOTH(COPIES)
