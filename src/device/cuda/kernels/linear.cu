// Small products of matrices, for which cuBLASLt divides the terms among blocks and adds them in a second
// kernel.

// A matrix by the distances between its rows and between its columns.
struct Matrix {
    const float* values;
    uint32 row_stride, column_stride;
};

// Terms of a sum that are in shared memory at a time.
const uint32 TERMS = 128;
// Rows and columns of a block's part of the product.
const uint32 SIDE = 16;

// The values of each factor that a thread copies at a time.
const uint32 EACH = SIDE * TERMS / 256;

// Reads this thread's part of `TERMS` terms from number `start` on, of 16 rows of the left factor, or columns
// of the right one, from number `first` on; those beyond the last are 0.
__device__ __forceinline__ void read_factor(
    float (&into)[EACH], const float* values, uint32 len, uint32 first, uint32 stride, uint32 terms,
    uint32 start, uint32 term_stride) {
    // neighbouring threads read neighbouring values
    bool by_terms = term_stride == 1;
#pragma unroll
    for (uint32 i = 0; i < EACH; i++) {
        uint32 at = threadIdx.x + 256 * i;
        uint32 line = by_terms ? at / TERMS : at % SIDE, term = by_terms ? at % TERMS : at / SIDE;
        bool is_inside = first + line < len && start + term < terms;
        uint64 place = (uint64)(first + line) * stride + (uint64)(start + term) * term_stride;
        into[i] = is_inside ? values[place] : 0;
    }
}

// Writes what read_factor has read to shared memory.
__device__ __forceinline__ void stage_factor(
    float (&into)[SIDE][TERMS + 1], const float (&read)[EACH], uint32 term_stride) {
    bool by_terms = term_stride == 1;
#pragma unroll
    for (uint32 i = 0; i < EACH; i++) {
        uint32 at = threadIdx.x + 256 * i;
        into[by_terms ? at / TERMS : at % SIDE][by_terms ? at % TERMS : at / SIDE] = read[i];
    }
}

// output = left · right + bias, added to what is there if `accumulate`, then ReLU if `relu`; `output` is
// `[rows, columns]`, `bias` may be null. A block of 256 threads has 16 × 16 values: each thread four of them,
// and a quarter of their terms.
extern "C" __global__ void small_product(
    uint32 rows, uint32 columns, uint32 terms, Matrix left, Matrix right, const float* bias, float* output,
    int accumulate, int relu) {
    __shared__ float lefts[SIDE][TERMS + 1], rights[SIDE][TERMS + 1], parts[4][SIDE][SIDE + 1];
    uint32 first_row = blockIdx.y * SIDE, first_column = blockIdx.x * SIDE;
    uint32 quarter = threadIdx.x / 64, y = threadIdx.x % 64 / 8, x = threadIdx.x % 8;
    float sums[2][2] = {{0, 0}, {0, 0}}, left_read[EACH], right_read[EACH];
    auto read = [&](uint32 start) {
        read_factor(
            left_read, left.values, rows, first_row, left.row_stride, terms, start, left.column_stride);
        read_factor(
            right_read, right.values, columns, first_column, right.column_stride, terms, start,
            right.row_stride);
    };
    read(0);
    for (uint32 start = 0; start < terms; start += TERMS) {
        __syncthreads();
        stage_factor(lefts, left_read, left.column_stride);
        stage_factor(rights, right_read, right.row_stride);
        __syncthreads();
        // the next terms arrive while these are multiplied
        if (start + TERMS < terms) {
            read(start + TERMS);
        }
        uint32 end = min(TERMS, terms - start);
#pragma unroll 4
        for (uint32 term = quarter; term < end; term += 4) {
            float a[2] = {lefts[y][term], lefts[y + 8][term]};
            float b[2] = {rights[x][term], rights[x + 8][term]};
            for (uint32 i = 0; i < 2; i++) {
                for (uint32 j = 0; j < 2; j++) {
                    sums[i][j] += a[i] * b[j];
                }
            }
        }
    }
    for (uint32 i = 0; i < 2; i++) {
        for (uint32 j = 0; j < 2; j++) {
            parts[quarter][y + 8 * i][x + 8 * j] = sums[i][j];
        }
    }
    __syncthreads();
    uint32 row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
    if (first_row + row < rows && first_column + column < columns) {
        float value = parts[0][row][column];
        for (uint32 part = 1; part < 4; part++) {
            value += parts[part][row][column];
        }
        value += bias ? bias[first_column + column] : 0;
        float* place = &output[(uint64)(first_row + row) * columns + first_column + column];
        value += accumulate ? *place : 0;
        *place = relu && value < 0 ? 0 : value;
    }
}
