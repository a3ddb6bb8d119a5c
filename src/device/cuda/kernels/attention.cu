// Attention, a warp for each query, and, for the gradients of keys and values, for each key. Scores are
// formed 32 at a time, a lane each, and never stored (Dao et al., "FlashAttention", 2022). What the
// backward pass needs of a softmax is computed again, because saved values are activations, which bf16
// would round.

// The most values of a lane: a head has at most 32 times as many.
#define LANE_VALUES 8

// The sizes of attention: see `AttentionShape`.
struct Sizes {
    uint32 positions, groups, heads, width;
    int causal;
    float scale;
};

__device__ __forceinline__ uint32 input_width(Sizes sizes) {
    return sizes.groups * (sizes.heads + 2) * sizes.width;
}

__device__ __forceinline__ uint32 output_width(Sizes sizes) {
    return sizes.groups * sizes.heads * sizes.width;
}

// The number of keys that the query at `position` sees.
__device__ __forceinline__ uint32 num_keys(Sizes sizes, uint32 position) {
    return sizes.causal ? position + 1 : sizes.positions;
}

template <class T>
__device__ __forceinline__ float dot(uint32 width, const T* left, const T* right) {
    float sum = 0;
    for (uint32 at = 0; at < width; at++) {
        sum += to_float(left[at]) * to_float(right[at]);
    }
    return sum;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int distance = 16; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

// A query of a sequence: the places of its arrays.
template <class T>
struct Query {
    const T* query;
    // the key and the value of position 0
    const T* keys;
    const T* values;
    uint64 output;
    uint32 position;
};

// Returns the query of this warp, counted over sequences, heads and the positions from `first` on, of which
// alone there are outputs.
template <class T>
__device__ __forceinline__ Query<T> query_of(Sizes sizes, uint32 first, uint64 warp, const T* input) {
    uint32 num = sizes.positions - first;
    uint32 head = (uint32)(warp / num % (sizes.groups * sizes.heads));
    uint64 row = warp / num / (sizes.groups * sizes.heads);
    Query<T> own;
    own.position = first + (uint32)(warp % num);
    const T* sequence = input + row * sizes.positions * input_width(sizes);
    const T* group = sequence + head / sizes.heads * (sizes.heads + 2) * sizes.width;
    own.query = group + (uint64)own.position * input_width(sizes) + head % sizes.heads * sizes.width;
    own.keys = group + sizes.heads * sizes.width;
    own.values = own.keys + sizes.width;
    own.output = (row * num + own.position - first) * output_width(sizes) + head * sizes.width;
    return own;
}

template <class T>
__device__ __forceinline__ void attention_forward(
    uint64 num_queries, uint32 first, Sizes sizes, const T* input, T* output) {
    uint64 warp = thread_index() / 32;
    if (warp >= num_queries) {
        return;
    }
    uint32 lane = threadIdx.x % 32, stride = input_width(sizes);
    Query<T> own = query_of(sizes, first, warp, input);
    uint32 end = num_keys(sizes, own.position);
    float values[LANE_VALUES] = {}, largest = -__uint_as_float(0x7f800000), total = 0;
    for (uint32 start = 0; start < end; start += 32) {
        uint32 key = start + lane;
        float score = -__uint_as_float(0x7f800000);
        if (key < end) {
            score = sizes.scale * dot(sizes.width, own.query, own.keys + (uint64)key * stride);
        }
        float most = fmaxf(largest, warp_max(score)), shrink = expf(largest - most);
        float weight = key < end ? expf(score - most) : 0;
        total = total * shrink + warp_sum(weight);
        largest = most;
        for (uint32 at = 0; at < LANE_VALUES; at++) {
            values[at] *= shrink;
        }
        for (uint32 other = 0; other < min(32u, end - start); other++) {
            float shared_weight = __shfl_sync(0xffffffffu, weight, other);
            const T* value = own.values + (uint64)(start + other) * stride;
            for (uint32 at = 0; at * 32 + lane < sizes.width; at++) {
                values[at] += shared_weight * to_float(value[at * 32 + lane]);
            }
        }
    }
    for (uint32 at = 0; at * 32 + lane < sizes.width; at++) {
        output[own.output + at * 32 + lane] = from_float<T>(values[at] / total);
    }
}

// Computes the gradient of each query, and leaves for the keys the logarithm of its softmax's sum and the
// product of its output with that's gradient.
template <class T>
__device__ __forceinline__ void attention_backward_queries(
    uint64 num_queries, Sizes sizes, const T* input, const T* output, const T* gradient, float* sums,
    T* input_gradient) {
    uint64 warp = thread_index() / 32;
    if (warp >= num_queries) {
        return;
    }
    uint32 lane = threadIdx.x % 32, stride = input_width(sizes);
    Query<T> own = query_of(sizes, 0, warp, input);
    uint32 end = num_keys(sizes, own.position);
    float largest = -__uint_as_float(0x7f800000), total = 0;
    for (uint32 start = 0; start < end; start += 32) {
        uint32 key = start + lane;
        float score = -__uint_as_float(0x7f800000);
        if (key < end) {
            score = sizes.scale * dot(sizes.width, own.query, own.keys + (uint64)key * stride);
        }
        float most = fmaxf(largest, warp_max(score));
        total = total * expf(largest - most) + warp_sum(key < end ? expf(score - most) : 0);
        largest = most;
    }
    float logarithm = largest + logf(total), product = 0;
    for (uint32 at = lane; at < sizes.width; at += 32) {
        product += to_float(output[own.output + at]) * to_float(gradient[own.output + at]);
    }
    product = warp_sum(product);
    float values[LANE_VALUES] = {};
    for (uint32 start = 0; start < end; start += 32) {
        uint32 key = start + lane;
        float change = 0;
        if (key < end) {
            float score = sizes.scale * dot(sizes.width, own.query, own.keys + (uint64)key * stride);
            float pull = dot(sizes.width, gradient + own.output, own.values + (uint64)key * stride);
            change = expf(score - logarithm) * (pull - product) * sizes.scale;
        }
        for (uint32 other = 0; other < min(32u, end - start); other++) {
            float shared_change = __shfl_sync(0xffffffffu, change, other);
            const T* key_values = own.keys + (uint64)(start + other) * stride;
            for (uint32 at = 0; at * 32 + lane < sizes.width; at++) {
                values[at] += shared_change * to_float(key_values[at * 32 + lane]);
            }
        }
    }
    for (uint32 at = 0; at * 32 + lane < sizes.width; at++) {
        input_gradient[own.query - input + at * 32 + lane] = from_float<T>(values[at]);
    }
    if (lane == 0) {
        sums[2 * warp] = logarithm;
        sums[2 * warp + 1] = product;
    }
}

// Computes the gradients of each key and its value, over the heads of its group.
template <class T>
__device__ __forceinline__ void attention_backward_keys(
    uint64 num_all_keys, Sizes sizes, const T* input, const T* gradient, const float* sums,
    T* input_gradient) {
    uint64 warp = thread_index() / 32;
    if (warp >= num_all_keys) {
        return;
    }
    uint32 lane = threadIdx.x % 32, stride = input_width(sizes);
    uint32 position = (uint32)(warp % sizes.positions);
    uint32 group = (uint32)(warp / sizes.positions % sizes.groups);
    uint64 row = warp / sizes.positions / sizes.groups;
    uint32 first = sizes.causal ? position : 0;
    float keys[LANE_VALUES] = {}, values[LANE_VALUES] = {};
    uint64 place = 0;
    for (uint32 head = 0; head < sizes.heads; head++) {
        uint64 before = (row * sizes.groups * sizes.heads + group * sizes.heads + head) * sizes.positions;
        for (uint32 start = first; start < sizes.positions; start += 32) {
            uint32 other = start + lane;
            float weight = 0, change = 0;
            Query<T> own = query_of(sizes, 0, before, input);
            place = own.keys + (uint64)position * stride - input;
            if (other < sizes.positions) {
                own = query_of(sizes, 0, before + other, input);
                float score = sizes.scale * dot(sizes.width, own.query, own.keys + (uint64)position * stride);
                float pull = dot(sizes.width, gradient + own.output, own.values + (uint64)position * stride);
                weight = expf(score - sums[2 * (before + other)]);
                change = weight * (pull - sums[2 * (before + other) + 1]) * sizes.scale;
            }
            for (uint32 at = 0; at < min(32u, sizes.positions - start); at++) {
                float shared_weight = __shfl_sync(0xffffffffu, weight, at);
                float shared_change = __shfl_sync(0xffffffffu, change, at);
                Query<T> query = query_of(sizes, 0, before + start + at, input);
                for (uint32 part = 0; part * 32 + lane < sizes.width; part++) {
                    uint32 column = part * 32 + lane;
                    keys[part] += shared_change * to_float(query.query[column]);
                    values[part] += shared_weight * to_float(gradient[query.output + column]);
                }
            }
        }
    }
    for (uint32 part = 0; part * 32 + lane < sizes.width; part++) {
        input_gradient[place + part * 32 + lane] = from_float<T>(keys[part]);
        input_gradient[place + sizes.width + part * 32 + lane] = from_float<T>(values[part]);
    }
}

// Rotates all queries and keys of `from`, which may be `values`: elements i and i + width/2 of one are a
// pair. Values of attention are copied.
template <class T>
__device__ __forceinline__ void rotate(
    uint64 num_vectors, uint32 positions, uint32 first, uint32 groups, uint32 heads, uint32 width, float base,
    int inverse, const T* from, T* values) {
    uint32 half = width / 2;
    for (uint64 at = thread_index(); at < num_vectors * half; at += num_threads()) {
        uint32 i = at % half, head = at / half % (heads + 2);
        uint64 group = at / half / (heads + 2), place = at / half * width + i;
        double angle = (first + group / groups % positions) * pow((double)base, -2.0 * i / width);
        bool is_rotated = head <= heads;
        float cosine = is_rotated ? (float)cos(angle) : 1, sine = is_rotated ? (float)sin(angle) : 0;
        float left = to_float(from[place]), right = to_float(from[place + half]);
        sine = inverse ? -sine : sine;
        values[place] = from_float<T>(left * cosine - right * sine);
        values[place + half] = from_float<T>(right * cosine + left * sine);
    }
}

#define ATTENTION(T, name)                                                                                   \
    extern "C" __global__ void attention_forward_##name(                                                     \
        uint64 num, uint32 first, uint32 positions, uint32 groups, uint32 heads, uint32 width, int causal,   \
        float scale, const T* input, T* output) {                                                            \
        Sizes sizes = {positions, groups, heads, width, causal, scale};                                      \
        attention_forward<T>(num, first, sizes, input, output);                                              \
    }                                                                                                        \
    extern "C" __global__ void attention_backward_queries_##name(                                            \
        uint64 num, uint32 positions, uint32 groups, uint32 heads, uint32 width, int causal, float scale,    \
        const T* input, const T* output, const T* gradient, float* sums, T* input_gradient) {                \
        Sizes sizes = {positions, groups, heads, width, causal, scale};                                      \
        attention_backward_queries<T>(num, sizes, input, output, gradient, sums, input_gradient);            \
    }                                                                                                        \
    extern "C" __global__ void attention_backward_keys_##name(                                               \
        uint64 num, uint32 positions, uint32 groups, uint32 heads, uint32 width, int causal, float scale,    \
        const T* input, const T* gradient, const float* sums, T* input_gradient) {                           \
        Sizes sizes = {positions, groups, heads, width, causal, scale};                                      \
        attention_backward_keys<T>(num, sizes, input, gradient, sums, input_gradient);                       \
    }                                                                                                        \
    extern "C" __global__ void rotate_##name(                                                                \
        uint64 num, uint32 positions, uint32 first, uint32 groups, uint32 heads, uint32 width, float base,   \
        int inverse, const T* from, T* values) {                                                             \
        rotate<T>(num, positions, first, groups, heads, width, base, inverse, from, values);                 \
    }

FOR_BOTH(ATTENTION)
