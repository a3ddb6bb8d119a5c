// Embeddings: tables with a row for each token, or for each position.

// Writes the row of each token, or 0 if it is not one of the `rows` rows from `first` on.
template <class T>
__device__ __forceinline__ void embed(
    uint64 len, uint32 first, uint32 rows, uint32 columns, const float* tokens, const float* table,
    T* output) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        uint32 row = (uint32)tokens[at / columns] - first;
        output[at] = from_float<T>(row < rows ? table[(uint64)row * columns + at % columns] : 0.0f);
    }
}

// A block for each row of the table adds up the gradient at the places of its token, in their order.
template <class T>
__device__ __forceinline__ void embed_backward(
    uint32 num_tokens, uint32 first, uint32 columns, const float* tokens, const T* gradient,
    float* table_gradient, int accumulate) {
    __shared__ float some[256];
    float token = (float)(first + blockIdx.x);
    float* row = table_gradient + (uint64)blockIdx.x * columns;
    for (uint32 start = 0; start < columns; start += blockDim.x) {
        uint32 column = start + threadIdx.x;
        float sum = accumulate && column < columns ? row[column] : 0;
        for (uint32 place = 0; place < num_tokens; place += 256) {
            uint32 num = min(256u, num_tokens - place);
            __syncthreads();
            for (uint32 at = threadIdx.x; at < num; at += blockDim.x) {
                some[at] = tokens[place + at];
            }
            __syncthreads();
            for (uint32 at = 0; at < num; at++) {
                if (some[at] == token && column < columns) {
                    sum += to_float(gradient[(uint64)(place + at) * columns + column]);
                }
            }
        }
        if (column < columns) {
            row[column] = sum;
        }
    }
}

// output = input + table for each sample of `table_len` values.
template <class T>
__device__ __forceinline__ void add_table(
    uint64 len, uint32 table_len, const T* input, const float* table, T* output) {
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        output[at] = from_float<T>(to_float(input[at]) + table[at % table_len]);
    }
}

#define EMBEDDINGS(T, name)                                                                                  \
    extern "C" __global__ void embed_##name(                                                                 \
        uint64 len, uint32 first, uint32 rows, uint32 columns, const float* tokens, const float* table,      \
        T* output) {                                                                                         \
        embed<T>(len, first, rows, columns, tokens, table, output);                                          \
    }                                                                                                        \
    extern "C" __global__ void embed_backward_##name(                                                        \
        uint32 num_tokens, uint32 first, uint32 columns, const float* tokens, const T* gradient,             \
        float* table_gradient, int accumulate) {                                                             \
        embed_backward<T>(num_tokens, first, columns, tokens, gradient, table_gradient, accumulate);         \
    }                                                                                                        \
    extern "C" __global__ void add_table_##name(                                                             \
        uint64 len, uint32 table_len, const T* input, const float* table, T* output) {                       \
        add_table<T>(len, table_len, input, table, output);                                                  \
    }

FOR_BOTH(EMBEDDINGS)
