// The draws of dropout.

// The draws of a module's dropout in a step: see `DropoutMask`. Without dropout, the threshold is 0.
struct DropoutMask {
    uint64 seed;
    // Where a recorded kernel reads the step; null for one that is started on its own.
    const uint32* step_address;
    uint32 step, module, threshold;
    float scale;

    // Returns numbers 4 · `block` to 4 · `block` + 3 of the generator Philox4x32-10 (Salmon et al., SC 2011).
    __device__ __forceinline__ Several<uint32, 4> draw(uint64 block) const {
        uint32 a = (uint32)block, b = (uint32)(block >> 32);
        uint32 c = step_address ? __ldg(step_address) : step, d = module;
        uint32 key = (uint32)seed, other_key = (uint32)(seed >> 32);
        for (int round = 0; round < 10; round++) {
            uint64 first = (uint64)0xD2511F53u * a, second = (uint64)0xCD9E8D57u * c;
            a = (uint32)(second >> 32) ^ b ^ key;
            b = (uint32)second;
            c = (uint32)(first >> 32) ^ d ^ other_key;
            d = (uint32)first;
            key += 0x9E3779B9u;
            other_key += 0xBB67AE85u;
        }
        return {a, b, c, d};
    }

    // Returns one number of the generator.
    __device__ __forceinline__ uint32 draw_one(uint64 number) const {
        Several<uint32, 4> block = draw(number / 4);
        uint32 at = number % 4;
        return at == 0 ? block.at[0] : at == 1 ? block.at[1] : at == 2 ? block.at[2] : block.at[3];
    }

    // Returns what the element with number `draw` is multiplied by.
    __device__ __forceinline__ float factor(uint32 draw) const {
        return draw >= threshold ? scale : 0;
    }
};
