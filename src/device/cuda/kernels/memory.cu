// Kernels of the runtime: casts, values that travel as arguments, sums of received values, of partial sums
// and of the buffers of several processes.

template <class From, class Into>
__device__ __forceinline__ void cast(uint64 len, const From* __restrict__ from, Into* __restrict__ into) {
    over_values<8>(len, (uint64)from | (uint64)into, [&](uint64 at, auto count) {
        Several<From, count.value> values = load<count.value>(from + at);
        Several<Into, count.value> results;
        for (uint32 i = 0; i < count.value; i++) {
            results.at[i] = from_float<Into>(to_float(values.at[i]));
        }
        store(into + at, results);
    });
}

extern "C" __global__ void cast_to_bf16(uint64 len, const float* from, bf16* into) {
    cast(len, from, into);
}

extern "C" __global__ void cast_to_f32(uint64 len, const bf16* from, float* into) {
    cast(len, from, into);
}

// Moves a few values to the host's memory, and leaves zeros.
extern "C" __global__ void take_few(uint32 len, float* from, volatile float* into) {
    if (threadIdx.x < len) {
        into[threadIdx.x] = from[threadIdx.x];
        from[threadIdx.x] = 0;
    }
}

// total[i] = Σ sums[row][i] for i < `own_len`, and rest[i − own_len] from there on, added to what is there
// if `accumulate`. Blocks are 32 elements wide and 8 rows high.
extern "C" __global__ void add_partial_sums(
    uint32 num_rows, uint32 len, const float* sums, float* total, uint32 own_len, float* rest,
    int accumulate) {
    __shared__ float tile[8][33];
    uint32 at = blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (at < len) {
        for (uint32 row = threadIdx.y; row < num_rows; row += 8) {
            sum += sums[(uint64)row * len + at];
        }
    }
    tile[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && at < len) {
        float* place = at < own_len ? &total[at] : &rest[at - own_len];
        float all = accumulate ? *place : 0;
        for (int row = 0; row < 8; row++) {
            all += tile[row][threadIdx.x];
        }
        *place = all;
    }
}

// Values that travel as arguments.
struct Few {
    float at[16];
};

struct Some {
    float at[960];
};

extern "C" __global__ void store_few(Few values, uint32 len, float* into) {
    if (threadIdx.x < len) {
        into[threadIdx.x] = values.at[threadIdx.x];
    }
}

extern "C" __global__ void store_some(const __grid_constant__ Some values, uint32 len, float* into) {
    if (thread_index() < len) {
        into[thread_index()] = values.at[thread_index()];
    }
}

// The logarithm of the most terms of a sum, and of the most whose pending sums leave registers for 16 bytes
// of each.
const int MOST_LEVELS = 16, FEW_LEVELS = 4;

// Adds term number `at`, which `sum` is, to those of the sums before it that a binary tree over all terms,
// cut off at the last, combines it with, as a binary counter counts; keeps it unless it is the last.
template <uint32 N, int LEVELS>
__device__ __forceinline__ void add_term(
    Several<float, N> (&pending)[LEVELS], Several<float, N>& sum, uint32 at, bool is_last) {
    bool is_kept = false;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        if (is_kept) {
        } else if (at >> level & 1) {
            for (uint32 i = 0; i < N; i++) {
                sum.at[i] = pending[level].at[i] + sum.at[i];
            }
        } else if (!is_last) {
            pending[level] = sum;
            is_kept = true;
        }
    }
}

template <uint32 N, class T>
__device__ __forceinline__ Several<float, N> to_floats(const Several<T, N>& values) {
    Several<float, N> floats;
    for (uint32 i = 0; i < N; i++) {
        floats.at[i] = to_float(values.at[i]);
    }
    return floats;
}

template <class T, uint32 N>
__device__ __forceinline__ Several<T, N> from_floats(const Several<float, N>& floats) {
    Several<T, N> values;
    for (uint32 i = 0; i < N; i++) {
        values.at[i] = from_float<T>(floats.at[i]);
    }
    return values;
}

// Adds the received terms inbox[term][i] to values[i], which are term number `own`, EACH values at a time.
template <uint32 EACH, int LEVELS, class T>
__device__ __forceinline__ void add_terms(
    uint64 len, T* __restrict__ values, const T* __restrict__ inbox, uint64 stride, uint32 terms,
    uint32 own) {
    over_values<EACH>(len, (uint64)values | (uint64)inbox | 16 / EACH * stride, [&](uint64 at, auto count) {
        const uint32 N = count.value;
        Several<float, N> pending[LEVELS], sum;
        for (uint32 term = 0; term <= terms; term++) {
            const T* others = inbox + (term < own ? term : term - 1) * stride;
            sum = to_floats<N>(load<N>(term == own ? values + at : others + at));
            add_term<N>(pending, sum, term, term == terms);
        }
        store(values + at, from_floats<T>(sum));
    });
}

#define ADDITIONS(T, name)                                                                                   \
    extern "C" __global__ void add_terms_##name(                                                             \
        uint64 len, T* values, const T* inbox, uint64 stride, uint32 terms, uint32 own) {                    \
        if (terms < 1 << FEW_LEVELS) {                                                                       \
            add_terms<16 / sizeof(T), FEW_LEVELS>(len, values, inbox, stride, terms, own);                   \
        } else {                                                                                             \
            add_terms<4, MOST_LEVELS>(len, values, inbox, stride, terms, own);                               \
        }                                                                                                    \
    }

FOR_BOTH(ADDITIONS)

// The addresses of an array in the buffers of all peers.
struct Peers {
    uint64 at[16];
    uint32 num;
};

// The logarithm of the most peers.
const int PEER_LEVELS = 4;

__device__ __forceinline__ uint64 addresses(const Peers& peers) {
    uint64 all = 0;
    for (uint32 rank = 0; rank < peers.num; rank++) {
        all |= peers.at[rank];
    }
    return all;
}

// Adds up values `first` to `first` + `len` of all peers, in the order of `add_terms`, and stores the sums
// with peers `into` to `end`. All values are read before the first is used; `NUM` is the number of peers.
template <class T, uint32 NUM>
__device__ __forceinline__ void sum_peers(
    uint64 first, uint64 len, const Peers& peers, uint32 into, uint32 end) {
    const uint32 EACH = 16 / sizeof(T);
    over_values<EACH>(len, addresses(peers) | first * sizeof(T), [&](uint64 at, auto count) {
        const uint32 N = count.value;
        Several<T, N> terms[NUM];
#pragma unroll
        for (uint32 rank = 0; rank < NUM; rank++) {
            terms[rank] = load<N>((const T*)peers.at[rank] + first + at);
        }
        Several<float, N> pending[PEER_LEVELS], sum;
#pragma unroll
        for (uint32 rank = 0; rank < NUM; rank++) {
            sum = to_floats<N>(terms[rank]);
            add_term<N>(pending, sum, rank, rank == NUM - 1);
        }
        Several<T, N> total = from_floats<T>(sum);
#pragma unroll
        for (uint32 rank = 0; rank < NUM; rank++) {
            if (rank >= into && rank < end) {
                store((T*)peers.at[rank] + first + at, total);
            }
        }
    });
}

// Adds up the buffers of any number of peers, one peer after the other.
template <class T>
__device__ __forceinline__ void sum_many_peers(
    uint64 first, uint64 len, const Peers& peers, uint32 into, uint32 end) {
    const uint32 EACH = 16 / sizeof(T);
    over_values<EACH>(len, addresses(peers) | first * sizeof(T), [&](uint64 at, auto count) {
        const uint32 N = count.value;
        Several<float, N> pending[PEER_LEVELS], sum;
        for (uint32 rank = 0; rank < peers.num; rank++) {
            sum = to_floats<N>(load<N>((const T*)peers.at[rank] + first + at));
            add_term<N>(pending, sum, rank, rank == peers.num - 1);
        }
        Several<T, N> total = from_floats<T>(sum);
        for (uint32 rank = into; rank < end; rank++) {
            store((T*)peers.at[rank] + first + at, total);
        }
    });
}

#define PEER_SUMS(T, name)                                                                                   \
    extern "C" __global__ void sum_peers_##name(                                                             \
        uint64 first, uint64 len, const __grid_constant__ Peers peers, uint32 into, uint32 end) {            \
        switch (peers.num) {                                                                                 \
            case 2: sum_peers<T, 2>(first, len, peers, into, end); break;                                    \
            case 4: sum_peers<T, 4>(first, len, peers, into, end); break;                                    \
            case 8: sum_peers<T, 8>(first, len, peers, into, end); break;                                    \
            default: sum_many_peers<T>(first, len, peers, into, end);                                        \
        }                                                                                                    \
    }

FOR_BOTH(PEER_SUMS)

// Copies values `first` to `first` + `len`, of two bytes each, of peer `from` to peers `into` to `end`, but
// not to itself.
extern "C" __global__ void copy_to_peers(
    uint64 first, uint64 len, const __grid_constant__ Peers peers, uint32 from, uint32 into, uint32 end) {
    over_values<8>(len, addresses(peers) | 2 * first, [&](uint64 at, auto count) {
        const uint32 N = count.value;
        Several<unsigned short, N> values = load<N>((const unsigned short*)peers.at[from] + first + at);
        for (uint32 rank = into; rank < end; rank++) {
            if (rank != from) {
                store((unsigned short*)peers.at[rank] + first + at, values);
            }
        }
    });
}
