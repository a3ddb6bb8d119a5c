// Rotary positions (Su et al., "RoFormer", 2021).

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

#define ROTATIONS(T, name)                                                                                   \
    extern "C" __global__ void rotate_##name(                                                                \
        uint64 num, uint32 positions, uint32 first, uint32 groups, uint32 heads, uint32 width, float base,   \
        int inverse, const T* from, T* values) {                                                             \
        rotate<T>(num, positions, first, groups, heads, width, base, inverse, from, values);                 \
    }

FOR_BOTH(ROTATIONS)
