// The optimizers' steps over flat slices, a pass each, with the squares of the (unscaled) gradient on the way.
//
// `update` holds what changes from step to step: learning rate, scale of the gradient, and Adam's two corrections. `copy`, if it is
// not null, receives the new parameters in bf16. Slices begin at multiples of 16 bytes. A parameter that is no finite number makes the
// sum of squares none: cuBLASLt's ReLU turns NaN into 0, so that the loss may not tell.

enum { LEARNING_RATE = 0, GRADIENT_SCALE = 1, BIAS_CORRECTION1 = 2, BIAS_CORRECTION2 = 3 };

struct SgdStep {
    float momentum;
    float weight_decay;
    int nesterov;
};

struct AdamStep {
    float beta1, beta2;
    // 1 − β, rounded once
    float share1, share2;
    float epsilon;
    float weight_decay;
    int decoupled;
};

__device__ __forceinline__ float sgd_element(
    const SgdStep& step, float rate, float scale, float parameter, float gradient, float* momentum) {
    float g = step.weight_decay * parameter + gradient * scale;
    if (step.momentum != 0) {
        float v = step.momentum * *momentum + g;
        *momentum = v;
        g = step.nesterov ? step.momentum * v + g : v;
    }
    return parameter - rate * g;
}

extern "C" __global__ void __launch_bounds__(256) sgd_step(
    SgdStep step, const float* update, uint64 len, float* parameters, bf16* copy, const float* gradients, float* momentum,
    float* partials, uint32* arrived, float* squares) {
    float rate = update[LEARNING_RATE], scale = update[GRADIENT_SCALE], sum = 0;
    bool moves = step.momentum != 0;
    uint64 fours = len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<float> p = ((Four<float>*)parameters)[four], g = ((const Four<float>*)gradients)[four], v;
        Four<bf16> c;
        if (moves) {
            v = ((Four<float>*)momentum)[four];
        }
        for (int i = 0; i < 4; i++) {
            sum += g.at[i] * g.at[i] + 0.0f * p.at[i];
            p.at[i] = sgd_element(step, rate, scale, p.at[i], g.at[i], &v.at[i]);
            c.at[i] = from_float<bf16>(p.at[i]);
        }
        ((Four<float>*)parameters)[four] = p;
        if (moves) {
            ((Four<float>*)momentum)[four] = v;
        }
        if (copy) {
            ((Four<bf16>*)copy)[four] = c;
        }
    }
    uint64 at = fours * 4 + thread_index();
    if (at < len) {
        float v = moves ? momentum[at] : 0;
        sum += gradients[at] * gradients[at] + 0.0f * parameters[at];
        parameters[at] = sgd_element(step, rate, scale, parameters[at], gradients[at], &v);
        if (moves) {
            momentum[at] = v;
        }
        if (copy) {
            copy[at] = from_float<bf16>(parameters[at]);
        }
    }
    grid_sum(sum, 1, partials, arrived, squares);
}

// Constants of Adam that are the same for all elements of a step.
struct AdamScales {
    float step_size, root, shrink, pull, scale;
};

__device__ __forceinline__ float adam_element(
    const AdamStep& step, const AdamScales& scales, float parameter, float gradient, float* first, float* second) {
    float g = scales.pull * parameter + gradient * scales.scale;
    float m = step.beta1 * *first + step.share1 * g;
    float v = step.beta2 * *second + step.share2 * g * g;
    *first = m;
    *second = v;
    return scales.shrink * parameter - scales.step_size * m / (sqrtf(v) * scales.root + step.epsilon);
}

extern "C" __global__ void __launch_bounds__(256) adam_step(
    AdamStep step, const float* update, uint64 len, float* parameters, bf16* copy, const float* gradients, float* first,
    float* second, float* partials, uint32* arrived, float* squares) {
    float rate = update[LEARNING_RATE], sum = 0;
    AdamScales scales;
    scales.step_size = rate / update[BIAS_CORRECTION1];
    scales.root = 1 / sqrtf(update[BIAS_CORRECTION2]);
    scales.shrink = step.decoupled ? 1 - rate * step.weight_decay : 1;
    scales.pull = step.decoupled ? 0 : step.weight_decay;
    scales.scale = update[GRADIENT_SCALE];
    uint64 fours = len / 4;
    for (uint64 four = thread_index(); four < fours; four += num_threads()) {
        Four<float> p = ((Four<float>*)parameters)[four], g = ((const Four<float>*)gradients)[four];
        Four<float> m = ((Four<float>*)first)[four], v = ((Four<float>*)second)[four];
        Four<bf16> c;
        for (int i = 0; i < 4; i++) {
            sum += g.at[i] * g.at[i] + 0.0f * p.at[i];
            p.at[i] = adam_element(step, scales, p.at[i], g.at[i], &m.at[i], &v.at[i]);
            c.at[i] = from_float<bf16>(p.at[i]);
        }
        ((Four<float>*)parameters)[four] = p;
        ((Four<float>*)first)[four] = m;
        ((Four<float>*)second)[four] = v;
        if (copy) {
            ((Four<bf16>*)copy)[four] = c;
        }
    }
    uint64 at = fours * 4 + thread_index();
    if (at < len) {
        sum += gradients[at] * gradients[at] + 0.0f * parameters[at];
        parameters[at] = adam_element(step, scales, parameters[at], gradients[at], &first[at], &second[at]);
        if (copy) {
            copy[at] = from_float<bf16>(parameters[at]);
        }
    }
    grid_sum(sum, 1, partials, arrived, squares);
}

extern "C" __global__ void __launch_bounds__(256) sum_squares(
    uint64 len, const float* values, float* partials, uint32* arrived, float* squares) {
    float sum = 0;
    for (uint64 at = thread_index(); at < len; at += num_threads()) {
        sum += values[at] * values[at];
    }
    grid_sum(sum, 1, partials, arrived, squares);
}
