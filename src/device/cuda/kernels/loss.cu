// Losses with their gradients. The loss is added to `sums[0]`, correct predictions to `sums[1]`.

#include "activation.cuh"

// Cross-entropy takes a warp for each row.
//
// What is known of a row's logits, over some classes or all: `statistics` is `[LEN, rows]` for each part
// of the classes, in their order.
struct RowOfLogits {
    float largest;
    // the class of the first of the largest logits
    uint32 best;
    float of_label;
};

const uint32 LARGEST = 0, BEST = 1, OF_LABEL = 2, LEN = 3;

__device__ __forceinline__ uint32 row_of_warp() {
    return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
}

// Finds the largest of `columns` logits and its column, which is `columns` if there are none.
template <class T>
__device__ __forceinline__ void find_largest(
    const T* logits, uint32 columns, uint32 lane, float& largest, uint32& best) {
    largest = -__uint_as_float(0x7f800000);
    best = columns;
    for (uint32 column = lane; column < columns; column += 32) {
        float logit = to_float(logits[column]);
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
}

// Returns the sum of the exponentials of the distances to the largest logit.
template <class T>
__device__ __forceinline__ float sum_of_exponentials(
    const T* logits, uint32 columns, uint32 lane, float largest) {
    float sum = 0;
    for (uint32 column = lane; column < columns; column += 32) {
        sum += expf(to_float(logits[column]) - largest);
    }
    return warp_sum(sum);
}

// Computes the gradient of logits of which `label` is the label's column, if it is below `columns`.
template <class T>
__device__ __forceinline__ void softmax_gradient(
    const T* logits, uint32 columns, uint32 lane, float largest, float sum, uint32 label, float scale,
    T* gradient) {
    for (uint32 column = lane; column < columns; column += 32) {
        float probability = expf(to_float(logits[column]) - largest) / sum;
        gradient[column] = from_float<T>(scale * (probability - (column == label ? 1.0f : 0.0f)));
    }
}

// Returns what is known of a row over all of `parts`.
__device__ __forceinline__ RowOfLogits row_of_all(
    const float* statistics, uint32 parts, uint32 rows, uint32 row) {
    RowOfLogits all = {0, 0, 0};
    for (uint32 part = 0; part < parts; part++) {
        const float* own = statistics + (uint64)part * LEN * rows + row;
        float largest = own[(uint64)LARGEST * rows];
        if (part == 0 || largest > all.largest) {
            all.largest = largest;
            all.best = (uint32)own[(uint64)BEST * rows];
        }
        // all terms but one are 0
        all.of_label += own[(uint64)OF_LABEL * rows];
    }
    return all;
}

// Adds the losses of rows and the number of correct predictions, which the first lane of each warp has.
__device__ __forceinline__ void add_predictions(
    float loss, float correct, float* partials, uint32* blocks_done, float* sums) {
    const float values[2] = {loss, correct};
    grid_sums(values, 1, partials, blocks_done, sums);
}

// Softmax and cross-entropy of whole rows.
template <class T>
__device__ __forceinline__ void softmax_cross_entropy(
    uint32 rows, uint32 columns, float scale, const T* logits, const float* labels, T* gradient,
    float* partials, uint32* blocks_done, float* sums) {
    uint32 lane = threadIdx.x % 32, row = row_of_warp();
    float loss = 0, correct = 0;
    if (row < rows) {
        const T* own = logits + (uint64)row * columns;
        float largest;
        uint32 best, label = (uint32)labels[row];
        find_largest(own, columns, lane, largest, best);
        float sum = sum_of_exponentials(own, columns, lane, largest);
        softmax_gradient(own, columns, lane, largest, sum, label, scale, gradient + (uint64)row * columns);
        if (lane == 0) {
            loss = logf(sum) + (largest - to_float(own[label]));
            correct = best == label ? 1 : 0;
        }
    }
    add_predictions(loss, correct, partials, blocks_done, sums);
}

// The statistics of the classes from `first` on.
template <class T>
__device__ __forceinline__ void logit_statistics(
    uint32 rows, uint32 columns, uint32 first, const T* logits, const float* labels, float* statistics) {
    uint32 lane = threadIdx.x % 32, row = row_of_warp();
    if (row >= rows) {
        return;
    }
    const T* own = logits + (uint64)row * columns;
    float largest;
    uint32 best, label = (uint32)labels[row] - first;
    find_largest(own, columns, lane, largest, best);
    if (lane == 0) {
        statistics[(uint64)LARGEST * rows + row] = largest;
        statistics[(uint64)BEST * rows + row] = (float)(first + best);
        // the difference is large for a class before the first
        statistics[(uint64)OF_LABEL * rows + row] = label < columns ? to_float(own[label]) : 0;
    }
}

// The sum of this part's exponentials of each row.
template <class T>
__device__ __forceinline__ void exponentials_of_part(
    uint32 rows, uint32 columns, uint32 parts, const T* logits, const float* statistics,
    float* exponentials) {
    uint32 lane = threadIdx.x % 32, row = row_of_warp();
    if (row >= rows) {
        return;
    }
    float largest = row_of_all(statistics, parts, rows, row).largest;
    float sum = sum_of_exponentials(logits + (uint64)row * columns, columns, lane, largest);
    if (lane == 0) {
        exponentials[row] = sum;
    }
}

// The gradient of this part of the classes, from `first` on, and the losses over all.
template <class T>
__device__ __forceinline__ void cross_entropy_of_part(
    uint32 rows, uint32 columns, uint32 first, uint32 parts, float scale, const T* logits,
    const float* labels, const float* statistics, const float* exponentials, T* gradient, float* partials,
    uint32* blocks_done, float* sums) {
    uint32 lane = threadIdx.x % 32, row = row_of_warp();
    float loss = 0, correct = 0;
    if (row < rows) {
        RowOfLogits all = row_of_all(statistics, parts, rows, row);
        uint32 label = (uint32)labels[row];
        uint64 start = (uint64)row * columns;
        float sum = exponentials[row];
        softmax_gradient(
            logits + start, columns, lane, all.largest, sum, label - first, scale, gradient + start);
        if (lane == 0) {
            loss = logf(sum) + (all.largest - all.of_label);
            correct = all.best == label ? 1 : 0;
        }
    }
    add_predictions(loss, correct, partials, blocks_done, sums);
}

// The mean over columns of (output − target)²; `targets` is null if all are 0. The gradient is that before
// the activation, of which `saved` is what the forward pass saved, or the output.
template <class T>
__device__ __forceinline__ void mean_squared_error(
    uint64 len, uint32 columns, float scale, const T* output, const float* targets, int activation,
    const T* saved, T* gradient, float* partials, uint32* blocks_done, float* sums) {
    float squares = 0, factor = 2 * scale / columns;
    uint64 alignment = (uint64)output | (uint64)targets | (uint64)saved | (uint64)gradient;
    over_values<8>(len, alignment, [&](uint64 at, auto count) {
        Several<T, count.value> values = load<count.value>(output + at), before = values;
        if (activation != IDENTITY) {
            before = load<count.value>(saved + at);
        }
        Several<float, count.value> wanted = {};
        if (targets) {
            wanted = load<count.value>(targets + at);
        }
        for (uint32 i = 0; i < count.value; i++) {
            float difference = to_float(values.at[i]) - wanted.at[i];
            squares += difference * difference;
            values.at[i] = from_float<T>(derive(activation, factor * difference, before.at[i]));
        }
        store(gradient + at, values);
    });
    grid_sum(squares, 1.0f / columns, partials, blocks_done, &sums[0]);
}

#define LOSSES(T, name)                                                                                      \
    extern "C" __global__ void cross_entropy_##name(                                                         \
        uint32 rows, uint32 columns, float scale, const T* logits, const float* labels, T* gradient,         \
        float* partials, uint32* blocks_done, float* sums) {                                                 \
        softmax_cross_entropy<T>(                                                                            \
            rows, columns, scale, logits, labels, gradient, partials, blocks_done, sums);                    \
    }                                                                                                        \
    extern "C" __global__ void find_logit_statistics_##name(                                                 \
        uint32 rows, uint32 columns, uint32 first, const T* logits, const float* labels,                     \
        float* statistics) {                                                                                 \
        logit_statistics<T>(rows, columns, first, logits, labels, statistics);                               \
    }                                                                                                        \
    extern "C" __global__ void sum_exponentials_##name(                                                      \
        uint32 rows, uint32 columns, uint32 parts, const T* logits, const float* statistics,                 \
        float* exponentials) {                                                                               \
        exponentials_of_part<T>(rows, columns, parts, logits, statistics, exponentials);                     \
    }                                                                                                        \
    extern "C" __global__ void finish_cross_entropy_##name(                                                  \
        uint32 rows, uint32 columns, uint32 first, uint32 parts, float scale, const T* logits,               \
        const float* labels, const float* statistics, const float* exponentials, T* gradient,                \
        float* partials, uint32* blocks_done, float* sums) {                                                 \
        cross_entropy_of_part<T>(                                                                            \
            rows, columns, first, parts, scale, logits, labels, statistics, exponentials, gradient,          \
            partials, blocks_done, sums);                                                                    \
    }                                                                                                        \
    extern "C" __global__ void mean_squared_error_##name(                                                    \
        uint64 len, uint32 columns, float scale, const T* output, const float* targets, int activation,      \
        const T* saved, T* gradient, float* partials, uint32* blocks_done, float* sums) {                    \
        mean_squared_error<T>(                                                                               \
            len, columns, scale, output, targets, activation, saved, gradient, partials, blocks_done,        \
            sums);                                                                                           \
    }

FOR_BOTH(LOSSES)
