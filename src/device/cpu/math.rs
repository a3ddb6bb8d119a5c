//! Functions that the compiler turns into vector code, unlike those of the C library. Each is
//! inlined into the loop of an operation, which runs with the widest vectors of the processor.

/// Returns tanh(x), within ±1, with a relative error below 4·10⁻⁷: a rational minimax fit on |x| ≤ 9,
/// beyond which tanh is ±1 to 3·10⁻⁸.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    const P: [f32; 6] =
        [0.999_999_94, 0.129_193_29, 2.920_867e-3, 9.268_314e-6, -1.278_285_1e-8, 1.826_067_3e-11];
    const Q: [f32; 4] = [1.0, 0.462_526_13, 2.376_360_8e-2, 2.281_143e-4];
    odd_rational(x.clamp(-9.0, 9.0), &P, &Q).clamp(-1.0, 1.0)
}

/// Returns exp(x) with a relative error below 2·10⁻⁷; x is clamped to −87 ≤ x ≤ 88.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // adding 1.5 · 2²³ leaves the nearest integer in the low bits; 127 is the bias of an exponent
    const ROUND: f32 = 12_583_039.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    // a minimax fit with a relative error below 10⁻⁷ for |r| ≤ ½ ln 2, and 1 for r = 0
    const P: [f32; 6] = [1.0, 0.999_999_7, 0.499_991_42, 0.166_676_45, 0.041_898_85, 0.008_290_145];
    polynomial(r, &P) * f32::from_bits(shifted.to_bits() << 23)
}

/// Returns the natural logarithm of a normal number x > 0, with the bits of `libm::logf`, whose method this
/// is; NaN for NaN.
#[inline(always)]
pub(super) fn ln(x: f32) -> f32 {
    const ROOT_OF_HALF: u32 = 0x3f35_04f3;
    const ONE: u32 = 0x3f80_0000;
    const SERIES: [f32; 4] = [0.666_666_6, 0.400_009_72, 0.284_987_87, 0.242_790_79];
    const LN_2_HIGH: f32 = 6.931_381e-1;
    const LN_2_LOW: f32 = 9.058_001e-6;
    // x = 2ᵏ · (1 + f) with √½ ≤ 1 + f < √2
    let shifted = x.to_bits().wrapping_add(ONE - ROOT_OF_HALF);
    let k = ((shifted >> 23) as i32 - 127) as f32;
    let f = f32::from_bits((shifted & 0x007f_ffff) + ROOT_OF_HALF) - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w * (SERIES[1] + w * SERIES[3]);
    let odd = z * (SERIES[0] + w * SERIES[2]);
    let half_square = 0.5 * f * f;
    let result = s * (half_square + (odd + even)) + k * LN_2_LOW - half_square + f + k * LN_2_HIGH;
    if x > 0.0 { result } else { f32::NAN }
}

/// Returns x · Φ(x) and its derivative Φ(x) + x · φ(x), with Φ and φ the distribution function and
/// the density of the normal distribution. Φ(−z) is e^(−z²/2) · t · P(t) with t = 1 / (1 + 0.3 z), as in
/// Abramowitz & Stegun, "Handbook of Mathematical Functions", 7.1.26, with a minimax fit of eight terms whose
/// relative error is 1.3·10⁻⁷, so that both functions need one exponential.
#[inline(always)]
pub(super) fn gelu(x: f32) -> (f32, f32) {
    const DENSITY: f32 = 0.398_942_3; // 1 / √(2π)
    const P: [f32; 8] = [
        0.119_626_39,
        0.120_798_33,
        0.099_637_64,
        0.129_468_76,
        -0.055_393_09,
        0.208_205_84,
        -0.158_275_58,
        0.035_931_64,
    ];
    let exponential = exp(-0.5 * x * x);
    let t = 1.0 / 0.3f32.mul_add(x.abs(), 1.0);
    let tail = exponential * (t * polynomial(t, &P));
    let distribution = if x > 0.0 { 1.0 - tail } else { tail };
    (x * distribution, x.mul_add(DENSITY * exponential, distribution))
}

/// Returns GELU with tanh in place of erf, and its derivative.
#[inline(always)]
pub(super) fn gelu_tanh(x: f32) -> (f32, f32) {
    const FACTOR: f32 = 0.797_884_6; // √(2 / π)
    const CUBIC: f32 = 0.044_715;
    let square = x * x;
    let t = tanh(FACTOR * x * square.mul_add(CUBIC, 1.0));
    let half = 0.5f32.mul_add(t, 0.5);
    let slope = FACTOR * square.mul_add(3.0 * CUBIC, 1.0);
    (x * half, (0.5 * x * (1.0 - t * t)).mul_add(slope, half))
}

/// Returns the logistic function 1 / (1 + e⁻ˣ) and its derivative.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> (f32, f32) {
    let value = 1.0 / (1.0 + exp(-x));
    (value, value * (1.0 - value))
}

/// Returns x · σ(x) and its derivative, with the logistic function σ.
#[inline(always)]
pub(super) fn silu(x: f32) -> (f32, f32) {
    let (sigmoid, slope) = sigmoid(x);
    (x * sigmoid, x.mul_add(slope, sigmoid))
}

#[inline(always)]
fn odd_rational(x: f32, p: &[f32], q: &[f32]) -> f32 {
    let square = x * x;
    x * polynomial(square, p) / polynomial(square, q)
}

#[inline(always)]
fn polynomial(x: f32, coefficients: &[f32]) -> f32 {
    coefficients.iter().rev().copied().reduce(|sum, c| sum.mul_add(x, c)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(range: f32, function: impl Fn(f32) -> f32, reference: impl Fn(f64) -> f64) -> f64 {
        (-200_000..=200_000)
            .map(|i| i as f32 / 200_000.0 * range)
            .map(|x| {
                (f64::from(function(x)) - reference(f64::from(x))).abs()
                    / reference(f64::from(x)).abs().max(1e-30)
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn functions_agree_with_the_library() {
        assert!(worst(12.0, tanh, libm::tanh) < 5e-7);
        assert!(worst(87.0, exp, libm::exp) < 2e-7);
        assert_eq!((exp(0.0), exp(f32::NEG_INFINITY)), (1.0, exp(-87.0)));
        assert!((1..10_000).all(|i| exp(-1e-9 * i as f32) <= 1.0), "a weight is at most 1");
    }

    #[test]
    fn gelu_and_its_derivative_agree_with_the_definition() {
        for i in -6000..=6000 {
            let x = f64::from(i) / 1000.0;
            let distribution = 0.5 * (1.0 + libm::erf(x / 2f64.sqrt()));
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let (value, derivative) = gelu(x as f32);
            assert!((f64::from(value) - x * distribution).abs() < 1e-6, "gelu({x}) = {value}");
            assert!(
                (f64::from(derivative) - distribution - x * density).abs() < 1e-6,
                "gelu'({x}) = {derivative}"
            );
        }
        // below zero too, where it is half of the complement of erf
        let value = |x: f64| 0.5 * x * libm::erfc(-x / 2f64.sqrt());
        assert!(worst(6.0, |x| gelu(-x.abs()).0, |x| value(-x.abs())) < 2e-6);
    }

    #[test]
    fn no_function_exceeds_its_limits() {
        for i in 0..=1_000_000 {
            let x = i as f32 / 100_000.0;
            assert!(tanh(x) <= 1.0 && tanh(-x) >= -1.0, "{x}");
        }
        for x in [-5.6, -10.0, -1e6] {
            assert!(gelu(x).0 <= 0.0 && gelu(x).0 > -7e-8, "{x}");
            assert!(gelu(x).1 <= 0.0 && gelu(x).1 > -4e-7, "{x}");
        }
        assert_eq!(gelu(1e6), (1e6, 1.0));
    }

    #[test]
    fn other_gates_agree_with_their_definitions() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let slope = |function: &dyn Fn(f64) -> f64, x: f64| (function(x + 1e-5) - function(x - 1e-5)) / 2e-5;
        let inner = |x: f64| (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
        let gelu = |x: f64| 0.5 * x * (1.0 + inner(x).tanh());
        type Pair<'a> = (fn(f32) -> (f32, f32), &'a dyn Fn(f64) -> f64);
        let pairs: [Pair<'_>; 3] =
            [(super::sigmoid, &sigmoid), (silu, &|x| x * sigmoid(x)), (gelu_tanh, &gelu)];
        for i in -9000..=9000 {
            let x = f64::from(i) / 1000.0;
            for (number, (function, reference)) in pairs.iter().enumerate() {
                let (value, derivative) = function(x as f32);
                assert!((f64::from(value) - reference(x)).abs() < 3e-6, "{number}: f({x}) = {value}");
                let expected = slope(reference, x);
                assert!((f64::from(derivative) - expected).abs() < 5e-6, "{number}: f'({x}) = {derivative}");
            }
        }
    }

    #[test]
    fn ln_has_the_bits_of_the_library() {
        for i in 0..2_000_000_u32 {
            // over all normal numbers
            let x = f32::from_bits(0x0080_0000 + i * 1056);
            assert_eq!(ln(x).to_bits(), libm::logf(x).to_bits(), "ln({x:e})");
        }
    }

    #[test]
    fn not_a_number_stays_one() {
        assert!(
            exp(f32::NAN).is_nan()
                && ln(f32::NAN).is_nan()
                && tanh(f32::NAN).is_nan()
                && gelu(f32::NAN).0.is_nan()
        );
    }
}
