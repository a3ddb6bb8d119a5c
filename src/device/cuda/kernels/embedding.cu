// Embeddings: tables with a row for each token, or for each position.

// Writes the row of each token, or 0 if it is not one of the `rows` rows from `first` on.
template <class T>
__device__ __forceinline__ void embed(
    uint64 len, uint32 first, uint32 rows, uint32 columns, const float* __restrict__ tokens,
    const float* __restrict__ table, T* __restrict__ output) {
    over_values<8>(len, (uint64)table | (uint64)output | 2 * columns, [&](uint64 at, auto count) {
        uint32 row = (uint32)tokens[at / columns] - first;
        Several<float, count.value> values = {};
        if (row < rows) {
            values = load<count.value>(table + (uint64)row * columns + at % columns);
        }
        Several<T, count.value> results;
        for (uint32 i = 0; i < count.value; i++) {
            results.at[i] = from_float<T>(values.at[i]);
        }
        store(output + at, results);
    });
}

// Adds up the gradient at the places of the token of row `blockIdx.x`, in their order, among the `num_own`
// tokens from `blockIdx.y * num_own` on. `sums` has the table's gradient for each `blockIdx.y`. Blocks have
// 256 threads.
template <class T>
__device__ __forceinline__ void embed_backward(
    uint32 num_tokens, uint32 num_own, uint32 first, uint32 columns, const float* __restrict__ tokens,
    const T* __restrict__ gradient, float* __restrict__ sums, int accumulate) {
    __shared__ uint32 places[256], counts[8];
    uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32 begin = blockIdx.y * num_own, end = min(num_tokens, begin + num_own);
    float token = (float)(first + blockIdx.x);
    float* row = sums + ((uint64)blockIdx.y * gridDim.x + blockIdx.x) * columns;
    for (uint32 start = 0; start < columns; start += 256) {
        uint32 column = start + threadIdx.x;
        bool has_column = column < columns;
        float sum = accumulate && has_column ? row[column] : 0;
        for (uint32 part = begin; part < end; part += 256) {
            uint32 at = part + threadIdx.x;
            bool is_own = at < end && tokens[at] == token;
            uint32 own_lanes = __ballot_sync(0xffffffffu, is_own);
            __syncthreads();
            if (lane == 0) {
                counts[warp] = __popc(own_lanes);
            }
            __syncthreads();
            uint32 before = 0, num = 0;
            for (uint32 other = 0; other < 8; other++) {
                before += other < warp ? counts[other] : 0;
                num += counts[other];
            }
            if (is_own) {
                places[before + __popc(own_lanes & ((1u << lane) - 1))] = at;
            }
            __syncthreads();
#pragma unroll 4
            for (uint32 place = 0; place < num; place++) {
                sum += has_column ? to_float(gradient[(uint64)places[place] * columns + column]) : 0;
            }
        }
        if (has_column) {
            row[column] = sum;
        }
    }
}

// output = input + table for each sample of `table_len` values.
template <class T>
__device__ __forceinline__ void add_table(
    uint64 len, uint32 table_len, const T* input, const float* table, T* output) {
    uint64 alignment = (uint64)input | (uint64)table | (uint64)output | 2 * table_len;
    over_values<8>(len, alignment, [&](uint64 at, auto count) {
        Several<T, count.value> values = load<count.value>(input + at);
        Several<float, count.value> terms = load<count.value>(table + at % table_len);
        for (uint32 i = 0; i < count.value; i++) {
            values.at[i] = from_float<T>(to_float(values.at[i]) + terms.at[i]);
        }
        store(output + at, values);
    });
}

#define EMBEDDINGS(T, name)                                                                                  \
    extern "C" __global__ void embed_##name(                                                                 \
        uint64 len, uint32 first, uint32 rows, uint32 columns, const float* tokens, const float* table,      \
        T* output) {                                                                                         \
        embed<T>(len, first, rows, columns, tokens, table, output);                                          \
    }                                                                                                        \
    extern "C" __global__ void embed_backward_##name(                                                        \
        uint32 num_tokens, uint32 num_own, uint32 first, uint32 columns, const float* tokens,                \
        const T* gradient, float* sums, int accumulate) {                                                    \
        embed_backward<T>(num_tokens, num_own, first, columns, tokens, gradient, sums, accumulate);          \
    }                                                                                                        \
    extern "C" __global__ void add_table_##name(                                                             \
        uint64 len, uint32 table_len, const T* input, const float* table, T* output) {                       \
        add_table<T>(len, table_len, input, table, output);                                                  \
    }

FOR_BOTH(EMBEDDINGS)
