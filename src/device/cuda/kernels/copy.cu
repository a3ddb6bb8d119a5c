// Fills, copies and sums: whole arrays, blocks of matrices, transposition, rows of a table.

template <class T>
__device__ __forceinline__ void copy_rows(
    uint32 rows, uint32 columns, uint32 from_stride, uint32 into_stride, const T* from, T* into) {
    for (uint64 at = thread_index(); at < (uint64)rows * columns; at += num_threads()) {
        uint64 row = at / columns, column = at % columns;
        into[row * into_stride + column] = from[row * from_stride + column];
    }
}

template <class T>
__device__ __forceinline__ void transpose_matrices(
    uint64 len, uint32 rows, uint32 columns, const T* input, T* output) {
    uint32 size = rows * columns;
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint64 matrix = at / size;
        uint32 place = (uint32)(at % size);
        output[at] = input[matrix * size + place % rows * columns + place / rows];
    }
}

// Copies row `numbers[i]` of `table` to row i of `into`; the numbers are the bits of the floats.
template <class T>
__device__ __forceinline__ void gather(
    uint64 len, uint32 columns, const float* table, const float* numbers, T* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint64 row = __float_as_uint(numbers[at / columns]);
        into[at] = from_float<T>(table[row * columns + at % columns]);
    }
}

template <class T>
__device__ __forceinline__ void fill_values(uint64 len, float value, T* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        into[at] = from_float<T>(value);
    }
}

template <class T>
__device__ __forceinline__ void add_values(uint64 len, const T* from, T* into) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        into[at] = from_float<T>(to_float(into[at]) + to_float(from[at]));
    }
}

#define COPIES(T, name)                                                                                      \
    extern "C" __global__ void fill_##name(uint64 len, float value, T* into) {                               \
        fill_values<T>(len, value, into);                                                                    \
    }                                                                                                        \
    extern "C" __global__ void add_##name(uint64 len, const T* from, T* into) {                              \
        add_values<T>(len, from, into);                                                                      \
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
        uint64 len, uint32 columns, const float* table, const float* numbers, T* into) {                     \
        gather<T>(len, columns, table, numbers, into);                                                       \
    }

FOR_BOTH(COPIES)
