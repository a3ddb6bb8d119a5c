// Losses with their gradients. The loss is added to `sums[0]`, correct predictions to `sums[1]`.

// Softmax and cross-entropy, a warp for each row.
template <class T>
__device__ __forceinline__ void softmax_cross_entropy(
    uint32 rows, uint32 columns, float scale, const T* logits, const float* labels, T* gradient,
    float* partials, uint32* blocks_done, float* sums) {
    uint32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    uint32 row = blockIdx.x * warps + threadIdx.x / 32;
    float loss = 0, correct = 0;
    if (row < rows) {
        const T* row_logits = logits + (uint64)row * columns;
        T* row_gradient = gradient + (uint64)row * columns;
        // the first of the largest logits
        float largest = -__uint_as_float(0x7f800000);
        uint32 best = columns;
        for (uint32 column = lane; column < columns; column += 32) {
            float logit = to_float(row_logits[column]);
            if (logit > largest || best == columns) {
                largest = logit;
                best = column;
            }
        }
        for (int distance = 16; distance > 0; distance /= 2) {
            float other = __shfl_xor_sync(0xffffffffu, largest, distance);
            uint32 place = __shfl_xor_sync(0xffffffffu, best, distance);
            bool is_larger = other > largest || (other == largest && place < best);
            if (place < columns && (best == columns || is_larger)) {
                largest = other;
                best = place;
            }
        }
        float sum = 0;
        for (uint32 column = lane; column < columns; column += 32) {
            sum += expf(to_float(row_logits[column]) - largest);
        }
        sum = warp_sum(sum);
        uint32 label = (uint32)labels[row];
        for (uint32 column = lane; column < columns; column += 32) {
            float probability = expf(to_float(row_logits[column]) - largest) / sum;
            row_gradient[column] = from_float<T>(scale * (probability - (column == label ? 1.0f : 0.0f)));
        }
        if (lane == 0) {
            loss = logf(sum) + (largest - to_float(row_logits[label]));
            correct = best == label ? 1 : 0;
        }
    }
    grid_sum(loss, 1, partials, blocks_done, &sums[0]);
    __syncthreads();
    grid_sum(correct, 1, partials + gridDim.x, blocks_done + 1, &sums[1]);
}

// The mean over columns of (output − target)²; `targets` is null if all are 0.
template <class T>
__device__ __forceinline__ void mean_squared_error(
    uint64 len, uint32 columns, float scale, const T* output, const float* targets, T* gradient,
    float* partials, uint32* blocks_done, float* sums) {
    float squares = 0, factor = 2 * scale / columns;
    uint64 fours = targets ? 0 : len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<T> values = ((const Four<T>*)output)[four];
        for (int i = 0; i < 4; i++) {
            float difference = to_float(values.at[i]);
            squares += difference * difference;
            values.at[i] = from_float<T>(factor * difference);
        }
        ((Four<T>*)gradient)[four] = values;
    }
    for (uint64 at = 4 * fours + thread_index(); at < len; at += num_threads()) {
        float difference = to_float(output[at]) - (targets ? targets[at] : 0);
        squares += difference * difference;
        gradient[at] = from_float<T>(factor * difference);
    }
    grid_sum(squares, 1.0f / columns, partials, blocks_done, &sums[0]);
}

#define LOSSES(T, name)                                                                                      \
    extern "C" __global__ void cross_entropy_##name(                                                         \
        uint32 rows, uint32 columns, float scale, const T* logits, const float* labels, T* gradient,         \
        float* partials, uint32* blocks_done, float* sums) {                                                 \
        softmax_cross_entropy<T>(                                                                            \
            rows, columns, scale, logits, labels, gradient, partials, blocks_done, sums);                    \
    }                                                                                                        \
    extern "C" __global__ void mean_squared_error_##name(                                                    \
        uint64 len, uint32 columns, float scale, const T* output, const float* targets, T* gradient,         \
        float* partials, uint32* blocks_done, float* sums) {                                                 \
        mean_squared_error<T>(                                                                               \
            len, columns, scale, output, targets, gradient, partials, blocks_done, sums);                    \
    }

FOR_BOTH(LOSSES)
