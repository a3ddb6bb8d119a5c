// Attention by tiles in shared memory (Dao, "FlashAttention-2", 2023). A warp has 16 queries, or, for the
// gradients of keys and values, 16 keys, and goes through tiles of the others. Scores are formed a tile at a
// time and never stored. What the backward pass needs of a softmax is computed again, because saved values
// are activations, which bf16 would round.
//
// The constants `HEAD_WIDTH` and `FORMAT` choose the kernels; without them there are all.
//
// A result does not depend on where its row stands in a tile: tiles begin at position 0, and a key that is
// not seen adds exactly 0, if its values are finite.

#include "dropout.cuh"
#include "tile.cuh"

// The sizes of attention: see `AttentionShape`.
struct Sizes {
    uint32 positions, groups, heads, width;
    int causal;
    float scale;
    DropoutMask mask;
    // The number of the first weight, and the distance between those of sequences.
    uint64 first_weight, row_stride;
};

// The rows of a tile that all warps of a block share, for heads of up to `WIDTH` values.
template <class T, uint32 WIDTH>
constexpr uint32 TILE_ROWS = WIDTH <= 128 ? 32 : sizeof(T) == 2 ? 16 : 8;

// The number of keys that the query at `position` sees.
__device__ __forceinline__ uint32 num_keys(Sizes sizes, uint32 position) {
    return sizes.causal ? position + 1 : sizes.positions;
}

__device__ __forceinline__ uint32 input_width(Sizes sizes) {
    return sizes.groups * (sizes.heads + 2) * sizes.width;
}

__device__ __forceinline__ uint32 output_width(Sizes sizes) {
    return sizes.groups * sizes.heads * sizes.width;
}

// A head of a sequence: where its queries, keys and values of position 0 stand in the input, its first
// output among all outputs, and the number of its first weight: see `AttentionDropout`.
struct Head {
    uint64 queries, keys, values, output, weights;
};

// The distance from the number of a query's first weight to that of the next.
__device__ __forceinline__ uint64 query_stride(Sizes sizes) {
    return (sizes.positions + 3) / 4 * 4;
}

// Returns head `index`, counted over all sequences. Outputs are those of the positions from `first` on.
__device__ __forceinline__ Head head_of(Sizes sizes, uint32 first, uint64 index) {
    uint32 head = (uint32)(index % (sizes.groups * sizes.heads));
    uint64 row = index / (sizes.groups * sizes.heads);
    uint64 group = row * sizes.positions * input_width(sizes);
    group += head / sizes.heads * (sizes.heads + 2) * sizes.width;
    Head own;
    own.queries = group + head % sizes.heads * sizes.width;
    own.keys = group + sizes.heads * sizes.width;
    own.values = own.keys + sizes.width;
    own.output = row * (sizes.positions - first) * output_width(sizes) + head * sizes.width;
    uint64 head_stride = sizes.positions * query_stride(sizes);
    own.weights = sizes.first_weight + row * sizes.row_stride + head * head_stride;
    return own;
}

// Returns what dropout multiplies the weight of `query` and `key` in a head by.
__device__ __forceinline__ float factor(Sizes sizes, Head head, uint32 query, uint32 key) {
    return sizes.mask.factor(sizes.mask.draw_one(head.weights + query * query_stride(sizes) + key));
}

// Drops out values of a head, of the queries from `query` on with the keys from `key` on.
template <uint32 KEYS>
__device__ __forceinline__ void drop_out(
    WarpMatrix<KEYS>& values, Sizes sizes, Head head, uint32 query, uint32 key) {
    if (sizes.mask.threshold == 0) {
        return;
    }
#pragma unroll
    for (uint32 at = 0; at < KEYS / 4; at++) {
        uint64 number = head.weights + (query + lane_row(at % 2)) * query_stride(sizes);
        number += key + lane_column(at / 2);
        // two neighbours, of an even key: a half of a block
        Several<uint32, 4> draws = sizes.mask.draw(number / 4);
        bool is_first = number % 4 == 0;
        values.at[at / 2][at % 2 * 2] *= sizes.mask.factor(is_first ? draws.at[0] : draws.at[2]);
        values.at[at / 2][at % 2 * 2 + 1] *= sizes.mask.factor(is_first ? draws.at[1] : draws.at[3]);
    }
}

// The largest score of each row so far, and the sum of the exponentials of the distances to it.
struct Softmax {
    float largest[2], totals[2];
};

__device__ __forceinline__ Softmax no_scores() {
    float lowest = -__uint_as_float(0x7f800000);
    return {{lowest, lowest}, {0, 0}};
}

// Turns the products of the queries from `position` on with the keys from `key` on into the exponentials of
// the scores' distances to the largest so far, and returns by what all earlier ones shrink.
template <uint32 COLUMNS>
__device__ __forceinline__ void add_scores(
    Softmax& softmax, WarpMatrix<COLUMNS>& scores, Sizes sizes, uint32 position, uint32 key, float* shrinks) {
#pragma unroll
    for (uint32 half = 0; half < 2; half++) {
        uint32 seen = min(num_keys(sizes, position + lane_row(half)), sizes.positions);
        float most = softmax.largest[half], total = 0;
#pragma unroll
        for (uint32 at = 0; at < COLUMNS / 4; at++) {
            float& score = scores.at[at / 2][2 * half + at % 2];
            bool is_seen = key + lane_column(at / 2) + at % 2 < seen;
            score = is_seen ? sizes.scale * score : -__uint_as_float(0x7f800000);
            most = fmaxf(most, score);
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
#pragma unroll
        for (uint32 at = 0; at < COLUMNS / 4; at++) {
            float& score = scores.at[at / 2][2 * half + at % 2];
            score = expf(score - most);
            total += score;
        }
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        shrinks[half] = expf(softmax.largest[half] - most);
        softmax.totals[half] = softmax.totals[half] * shrinks[half] + total;
        softmax.largest[half] = most;
    }
}

// A block has `blockDim.x / 2` queries of a head; the last ones, which see the most keys, come first.
template <class T, uint32 WIDTH>
__device__ __forceinline__ void attention_forward(
    uint32 tiles, uint32 first, Sizes sizes, const T* input, T* output) {
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32 KEYS = TILE_ROWS<T, WIDTH>, ROW = STRIDE<T, WIDTH>;
    uint32 rows = blockDim.x / 2, warp_start = threadIdx.x / 32 * WARP_ROWS, stride = input_width(sizes);
    T *queries = (T*)memory, *keys = queries + rows * ROW, *values = keys + KEYS * ROW;
    T* weights = values + KEYS * ROW + warp_start * STRIDE<T, KEYS>;
    Head own = head_of(sizes, first, blockIdx.x / tiles);
    uint32 start = first + (tiles - 1 - blockIdx.x % tiles) * rows;
    load_tile<T, WIDTH>(
        queries, rows, sizes.positions - start, sizes.width, input + own.queries + (uint64)start * stride,
        stride);
    uint32 end = num_keys(sizes, min(start + rows, sizes.positions) - 1);
    WarpMatrix<WIDTH> sums = {};
    Softmax softmax = no_scores();
    for (uint32 key = 0; key < end; key += KEYS) {
        uint64 place = (uint64)key * stride;
        __syncthreads();
        load_tile<T, WIDTH>(keys, KEYS, end - key, sizes.width, input + own.keys + place, stride);
        load_tile<T, WIDTH>(values, KEYS, end - key, sizes.width, input + own.values + place, stride);
        __syncthreads();
        WarpMatrix<KEYS> scores = {};
        float shrinks[2];
        multiply_transposed<KEYS, WIDTH>(scores, queries + warp_start * ROW, keys, ROW);
        add_scores(softmax, scores, sizes, start + warp_start, key, shrinks);
        scale_rows(sums, shrinks);
        drop_out(scores, sizes, own, start + warp_start, key);
        store_warp(scores, weights);
        multiply<WIDTH, KEYS>(sums, weights, STRIDE<T, KEYS>, values, ROW);
    }
    uint32 position = start + warp_start, num = max(position, sizes.positions) - position;
    float factors[2] = {1 / softmax.totals[0], 1 / softmax.totals[1]};
    T* into = output + own.output + (uint64)(position - first) * output_width(sizes);
    store_rows<T, WIDTH>(sums, num, sizes.width, factors, into, output_width(sizes));
}

// Returns the scalar products of the first `num` rows of a warp, of `width` values.
template <class T>
__device__ __forceinline__ void row_products(
    uint32 num, uint32 width, const T* left, const T* right, uint64 stride, float* products) {
    for (uint32 row = 0; row < WARP_ROWS; row++) {
        float product = 0;
        for (uint32 at = threadIdx.x % 32; row < num && at < width; at += 32) {
            product += to_float(left[row * stride + at]) * to_float(right[row * stride + at]);
        }
        product = warp_sum(product);
        if (lane_row(row / 8) == row) {
            products[row / 8] = product;
        }
    }
}

// Computes the gradients of the queries, and leaves for the keys the logarithm of each softmax's sum and the
// scalar product of its output and the gradient of that.
template <class T, uint32 WIDTH>
__device__ __forceinline__ void attention_backward_queries(
    uint32 tiles, Sizes sizes, const T* input, const T* output, const T* gradient, float* sums,
    T* input_gradient) {
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32 KEYS = TILE_ROWS<T, WIDTH>, ROW = STRIDE<T, WIDTH>;
    uint32 rows = blockDim.x / 2, warp_start = threadIdx.x / 32 * WARP_ROWS, stride = input_width(sizes);
    T *queries = (T*)memory, *gradients = queries + rows * ROW, *keys = gradients + rows * ROW;
    T *values = keys + KEYS * ROW, *changes = values + KEYS * ROW + warp_start * STRIDE<T, KEYS>;
    Head own = head_of(sizes, 0, blockIdx.x / tiles);
    uint32 start = (tiles - 1 - blockIdx.x % tiles) * rows, out_stride = output_width(sizes);
    uint64 place = own.queries + (uint64)start * stride, out = own.output + (uint64)start * out_stride;
    load_tile<T, WIDTH>(queries, rows, sizes.positions - start, sizes.width, input + place, stride);
    load_tile<T, WIDTH>(gradients, rows, sizes.positions - start, sizes.width, gradient + out, out_stride);
    uint32 position = start + warp_start, num = max(position, sizes.positions) - position;
    float products[2];
    uint64 warp_out = out + (uint64)warp_start * out_stride;
    row_products(num, sizes.width, output + warp_out, gradient + warp_out, out_stride, products);
    uint32 end = num_keys(sizes, min(start + rows, sizes.positions) - 1);
    WarpMatrix<WIDTH> query_sums = {};
    Softmax softmax = no_scores();
    for (uint32 key = 0; key < end; key += KEYS) {
        uint64 key_place = (uint64)key * stride;
        __syncthreads();
        load_tile<T, WIDTH>(keys, KEYS, end - key, sizes.width, input + own.keys + key_place, stride);
        load_tile<T, WIDTH>(values, KEYS, end - key, sizes.width, input + own.values + key_place, stride);
        __syncthreads();
        WarpMatrix<KEYS> scores = {}, pulls = {};
        float shrinks[2];
        multiply_transposed<KEYS, WIDTH>(scores, queries + warp_start * ROW, keys, ROW);
        multiply_transposed<KEYS, WIDTH>(pulls, gradients + warp_start * ROW, values, ROW);
        add_scores(softmax, scores, sizes, position, key, shrinks);
        drop_out(pulls, sizes, own, position, key);
#pragma unroll
        for (uint32 at = 0; at < KEYS / 2; at++) {
            scores.at[at / 4][at % 4] *= pulls.at[at / 4][at % 4] - products[at % 4 / 2];
        }
        scale_rows(query_sums, shrinks);
        store_warp(scores, changes);
        multiply<WIDTH, KEYS>(query_sums, changes, STRIDE<T, KEYS>, keys, ROW);
    }
    float factors[2] = {sizes.scale / softmax.totals[0], sizes.scale / softmax.totals[1]};
    T* into = input_gradient + place + (uint64)warp_start * stride;
    store_rows<T, WIDTH>(query_sums, num, sizes.width, factors, into, stride);
    float* own_sums = sums + 2 * ((uint64)(blockIdx.x / tiles) * sizes.positions + position);
    for (uint32 half = 0; half < 2; half++) {
        if (threadIdx.x % 4 == 0 && lane_row(half) < num) {
            own_sums[2 * lane_row(half)] = softmax.largest[half] + logf(softmax.totals[half]);
            own_sums[2 * lane_row(half) + 1] = products[half];
        }
    }
}

// Computes the gradients of the keys and values of a group, over its heads.
template <class T, uint32 WIDTH>
__device__ __forceinline__ void attention_backward_keys(
    uint32 tiles, Sizes sizes, const T* input, const T* gradient, const float* sums, T* input_gradient) {
    extern __shared__ __align__(16) unsigned char memory[];
    const uint32 QUERIES = TILE_ROWS<T, WIDTH>, ROW = STRIDE<T, WIDTH>;
    uint32 rows = blockDim.x / 2, warp_start = threadIdx.x / 32 * WARP_ROWS, stride = input_width(sizes);
    T *keys = (T*)memory, *values = keys + rows * ROW, *queries = values + rows * ROW;
    T *gradients = queries + QUERIES * ROW, *own_weights = gradients + QUERIES * ROW;
    T* weights = own_weights + warp_start * STRIDE<T, QUERIES>;
    uint64 first_head = blockIdx.x / tiles * sizes.heads;
    Head group = head_of(sizes, 0, first_head);
    uint32 start = blockIdx.x % tiles * rows, num_rows = sizes.positions - start;
    uint64 place = (uint64)start * stride;
    load_tile<T, WIDTH>(keys, rows, num_rows, sizes.width, input + group.keys + place, stride);
    load_tile<T, WIDTH>(values, rows, num_rows, sizes.width, input + group.values + place, stride);
    WarpMatrix<WIDTH> key_sums = {}, value_sums = {};
    for (uint32 head = 0; head < sizes.heads; head++) {
        Head own = head_of(sizes, 0, first_head + head);
        const float* head_sums = sums + 2 * (first_head + head) * sizes.positions;
        uint32 first = sizes.causal ? start / QUERIES * QUERIES : 0;
        for (uint32 query = first; query < sizes.positions; query += QUERIES) {
            uint32 num = sizes.positions - query, out_stride = output_width(sizes);
            const T* from = input + own.queries + (uint64)query * stride;
            __syncthreads();
            load_tile<T, WIDTH>(queries, QUERIES, num, sizes.width, from, stride);
            from = gradient + own.output + (uint64)query * out_stride;
            load_tile<T, WIDTH>(gradients, QUERIES, num, sizes.width, from, out_stride);
            __syncthreads();
            WarpMatrix<QUERIES> scores = {}, pulls = {};
            multiply_transposed<QUERIES, WIDTH>(scores, keys + warp_start * ROW, queries, ROW);
            multiply_transposed<QUERIES, WIDTH>(pulls, values + warp_start * ROW, gradients, ROW);
#pragma unroll
            for (uint32 at = 0; at < QUERIES / 2; at++) {
                uint32 position = query + lane_column(at / 4) + at % 2;
                uint32 key = start + warp_start + lane_row(at % 4 / 2);
                bool is_seen = position < sizes.positions && key < num_keys(sizes, position);
                float logarithm = is_seen ? head_sums[2 * position] : 0;
                float product = is_seen ? head_sums[2 * position + 1] : 0;
                float& score = scores.at[at / 4][at % 4];
                score = is_seen ? expf(sizes.scale * score - logarithm) : 0;
                float& pull = pulls.at[at / 4][at % 4];
                float kept = sizes.mask.threshold > 0 ? factor(sizes, own, position, key) : 1;
                pull = is_seen ? score * (kept * pull - product) : 0;
                score *= kept;
            }
            store_warp(scores, weights);
            multiply<WIDTH, QUERIES>(value_sums, weights, STRIDE<T, QUERIES>, gradients, ROW);
            store_warp(pulls, weights);
            multiply<WIDTH, QUERIES>(key_sums, weights, STRIDE<T, QUERIES>, queries, ROW);
        }
    }
    uint32 num = max(start + warp_start, sizes.positions) - (start + warp_start);
    const float key_factors[2] = {sizes.scale, sizes.scale}, value_factors[2] = {1, 1};
    T* into = input_gradient + place + (uint64)warp_start * stride;
    store_rows<T, WIDTH>(key_sums, num, sizes.width, key_factors, into + group.keys, stride);
    store_rows<T, WIDTH>(value_sums, num, sizes.width, value_factors, into + group.values, stride);
}

// Kernels for heads of up to `columns` values in format `T`.
#define ATTENTION(T, columns)                                                                                \
    extern "C" __global__ void __launch_bounds__(128) attention_forward_##columns##_##T(                     \
        uint32 tiles, uint32 first, Sizes sizes, const T* input, T* output) {                                \
        attention_forward<T, columns>(tiles, first, sizes, input, output);                                   \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128) attention_backward_queries_##columns##_##T(            \
        uint32 tiles, Sizes sizes, const T* input, const T* output, const T* gradient, float* sums,          \
        T* input_gradient) {                                                                                 \
        attention_backward_queries<T, columns>(                                                              \
            tiles, sizes, input, output, gradient, sums, input_gradient);                                    \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(128) attention_backward_keys_##columns##_##T(               \
        uint32 tiles, Sizes sizes, const T* input, const T* gradient, const float* sums,                     \
        T* input_gradient) {                                                                                 \
        attention_backward_keys<T, columns>(tiles, sizes, input, gradient, sums, input_gradient);            \
    }

#define ATTENTION_OF(columns, T) ATTENTION(T, columns)

#ifdef HEAD_WIDTH
ATTENTION_OF(HEAD_WIDTH, FORMAT)
#else
#define FOR_WIDTHS(T) ATTENTION(T, 32) ATTENTION(T, 64) ATTENTION(T, 128) ATTENTION(T, 256)
FOR_WIDTHS(f32)
FOR_WIDTHS(bf16)
#endif
