// The optimizers' steps over flat slices, one pass each, which also sums the squares of the
// unscaled gradient.
//
// Slices begin at multiples of 16 bytes. A parameter that is NaN or infinite makes the sum of
// squares NaN: cuBLASLt's ReLU turns NaN into 0, so the loss may not show it.

// Indices into the values that change from step to step.
enum { LEARNING_RATE = 0, GRADIENT_SCALE = 1, BIAS_CORRECTION1 = 2, BIAS_CORRECTION2 = 3 };

enum { MAX_SLOTS = 4 };

// The arrays of a step. `copy`, if it is not null, receives the new parameters in bf16.
struct OptimizerArrays {
    uint64 len;
    const float* update;
    float* parameters;
    bf16* copy;
    const float* gradients;
    float* slots[MAX_SLOTS];
    float* partials;
    uint32* blocks_done;
    float* squares;
};

struct SgdConstants {
    float momentum;
    float weight_decay;
    int nesterov;
};

struct AdamConstants {
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2; // rounded once
    float epsilon;
    float weight_decay;
    int decoupled;
};

struct LionConstants {
    float beta1, beta2;
    float one_minus_beta1, one_minus_beta2; // rounded once
    float weight_decay;
};

// Applies `rule` to all elements: `rule.step(parameter, gradient, slot)` returns the new parameter
// and updates the element's slots, of which `slot(i)` is a reference. Rules must write sums of two
// products with `fmaf`: the compiler would choose which product to round, differently in different
// places.
template <class Rule>
__device__ __forceinline__ void optimizer_step(const Rule& rule, const OptimizerArrays& arrays) {
    float sum = 0;
    uint64 fours = arrays.len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<float> p = ((Four<float>*)arrays.parameters)[four];
        Four<float> g = ((const Four<float>*)arrays.gradients)[four];
        Four<float> s[Rule::SLOTS + 1];
        Four<bf16> c;
        for (int slot = 0; slot < Rule::SLOTS; slot++) {
            s[slot] = ((Four<float>*)arrays.slots[slot])[four];
        }
        for (int i = 0; i < 4; i++) {
            sum += g.at[i] * g.at[i] + 0.0f * p.at[i];
            p.at[i] = rule.step(p.at[i], g.at[i], [&](int slot) -> float& { return s[slot].at[i]; });
            c.at[i] = from_float<bf16>(p.at[i]);
        }
        ((Four<float>*)arrays.parameters)[four] = p;
        for (int slot = 0; slot < Rule::SLOTS; slot++) {
            ((Four<float>*)arrays.slots[slot])[four] = s[slot];
        }
        if (arrays.copy) {
            ((Four<bf16>*)arrays.copy)[four] = c;
        }
    }
    uint64 at = fours * 4 + thread_index();
    if (at < arrays.len) {
        float p = arrays.parameters[at], g = arrays.gradients[at], s[Rule::SLOTS + 1];
        for (int slot = 0; slot < Rule::SLOTS; slot++) {
            s[slot] = arrays.slots[slot][at];
        }
        sum += g * g + 0.0f * p;
        p = rule.step(p, g, [&](int slot) -> float& { return s[slot]; });
        arrays.parameters[at] = p;
        for (int slot = 0; slot < Rule::SLOTS; slot++) {
            arrays.slots[slot][at] = s[slot];
        }
        if (arrays.copy) {
            arrays.copy[at] = from_float<bf16>(p);
        }
    }
    grid_sum(sum, 1, arrays.partials, arrays.blocks_done, arrays.squares);
}

template <bool MOMENTUM>
struct Sgd {
    enum { SLOTS = MOMENTUM };
    float momentum, weight_decay, learning_rate, gradient_scale;
    bool nesterov;

    __device__ __forceinline__ Sgd(const SgdConstants& constants, const float* update) {
        momentum = constants.momentum;
        weight_decay = constants.weight_decay;
        learning_rate = update[LEARNING_RATE];
        gradient_scale = update[GRADIENT_SCALE];
        nesterov = constants.nesterov;
    }

    template <class Slots>
    __device__ __forceinline__ float step(float parameter, float gradient, Slots slot) const {
        float g = fmaf(weight_decay, parameter, gradient * gradient_scale);
        if (MOMENTUM) {
            float v = momentum * slot(0) + g;
            slot(0) = v;
            g = nesterov ? momentum * v + g : v;
        }
        return parameter - learning_rate * g;
    }
};

struct Adam {
    enum { SLOTS = 2 };
    float beta1, beta2, one_minus_beta1, one_minus_beta2, epsilon;
    float step_size;
    float inverse_root_correction2;
    float decay; // factor of the parameter: decoupled weight decay
    float l2; // multiple of the parameter in the gradient: weight decay that is not decoupled
    float gradient_scale;

    __device__ __forceinline__ Adam(const AdamConstants& constants, const float* update) {
        float learning_rate = update[LEARNING_RATE];
        beta1 = constants.beta1;
        beta2 = constants.beta2;
        one_minus_beta1 = constants.one_minus_beta1;
        one_minus_beta2 = constants.one_minus_beta2;
        epsilon = constants.epsilon;
        step_size = learning_rate / update[BIAS_CORRECTION1];
        inverse_root_correction2 = 1 / sqrtf(update[BIAS_CORRECTION2]);
        decay = constants.decoupled ? 1 - learning_rate * constants.weight_decay : 1;
        l2 = constants.decoupled ? 0 : constants.weight_decay;
        gradient_scale = update[GRADIENT_SCALE];
    }

    template <class Slots>
    __device__ __forceinline__ float step(float parameter, float gradient, Slots slot) const {
        float g = fmaf(l2, parameter, gradient * gradient_scale);
        float m = fmaf(beta1, slot(0), one_minus_beta1 * g);
        float v = fmaf(beta2, slot(1), one_minus_beta2 * g * g);
        slot(0) = m;
        slot(1) = v;
        return decay * parameter - step_size * m / (sqrtf(v) * inverse_root_correction2 + epsilon);
    }
};

struct Lion {
    enum { SLOTS = 1 };
    float beta1, beta2, one_minus_beta1, one_minus_beta2;
    float learning_rate;
    float decay; // factor of the parameter: decoupled weight decay
    float gradient_scale;

    __device__ __forceinline__ Lion(const LionConstants& constants, const float* update) {
        beta1 = constants.beta1;
        beta2 = constants.beta2;
        one_minus_beta1 = constants.one_minus_beta1;
        one_minus_beta2 = constants.one_minus_beta2;
        learning_rate = update[LEARNING_RATE];
        decay = 1 - learning_rate * constants.weight_decay;
        gradient_scale = update[GRADIENT_SCALE];
    }

    template <class Slots>
    __device__ __forceinline__ float step(float parameter, float gradient, Slots slot) const {
        float g = gradient * gradient_scale;
        float interpolation = fmaf(beta1, slot(0), one_minus_beta1 * g);
        slot(0) = fmaf(beta2, slot(0), one_minus_beta2 * g);
        // 0 has no sign, and NaN stays
        float sign = interpolation > 0 ? 1.0f : interpolation < 0 ? -1.0f : interpolation;
        return fmaf(decay, parameter, -learning_rate * sign);
    }
};

extern "C" __global__ void __launch_bounds__(256) sgd_step(SgdConstants constants, OptimizerArrays arrays) {
    optimizer_step(Sgd<false>(constants, arrays.update), arrays);
}

extern "C" __global__ void __launch_bounds__(256) sgd_momentum_step(
    SgdConstants constants, OptimizerArrays arrays) {
    optimizer_step(Sgd<true>(constants, arrays.update), arrays);
}

extern "C" __global__ void __launch_bounds__(256) adam_step(AdamConstants constants, OptimizerArrays arrays) {
    optimizer_step(Adam(constants, arrays.update), arrays);
}

extern "C" __global__ void __launch_bounds__(256) lion_step(LionConstants constants, OptimizerArrays arrays) {
    optimizer_step(Lion(constants, arrays.update), arrays);
}

extern "C" __global__ void __launch_bounds__(256) sum_squares(
    uint64 len, const float* values, float* partials, uint32* blocks_done, float* squares) {
    float sum = 0;
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        sum += values[at] * values[at];
    }
    grid_sum(sum, 1, partials, blocks_done, squares);
}

// Writes the factor that scales a gradient to a norm of at most `largest`: see `clip_factor`. `squares` has
// `num` sums of its squares. Of the 256 threads of the one block, each adds up every 256th sum, then a tree
// adds theirs.
extern "C" __global__ void __launch_bounds__(256) clip_gradient(
    uint32 num, double largest, const float* squares, float* update) {
    __shared__ double sums[256];
    double sum = 0;
    for (uint32 at = threadIdx.x; at < num; at += 256) {
        sum += squares[at];
    }
    sums[threadIdx.x] = sum;
    for (uint32 half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            sums[threadIdx.x] += sums[threadIdx.x + half];
        }
    }
    if (threadIdx.x == 0) {
        double factor = largest / (sqrt(sums[0]) + 1e-6);
        // NaN stays
        update[GRADIENT_SCALE] = (float)(factor > 1 ? 1 : factor);
    }
}
