//! [`ExactSum`]: a sum that is rounded once, when it is read.
//!
//! The accumulator is a fixed-point number that is wide enough for every term: Kulisch & Miranker,
//! "The arithmetic of the digital computer: a new approach", SIAM Review 1986. Additions to it are
//! exact, so they may come in any order, and be spread over threads and ranks. An array is first
//! reduced in `f64` lanes: each term is cut at a bit so high that the sum of all upper sections is
//! exact, then the lower sections likewise, until nothing is left (Rump, Ogita & Oishi, "Accurate
//! floating-point summation", SIAM J. Sci. Comput. 2008). Three sections at fixed bits hold the squares of
//! most arrays, which are then read once.

use std::ops::AddAssign;

use bytemuck::{Pod, Zeroable};

/// The power of two of the accumulator's lowest bit: the square of the smallest `f32` is 2⁻²⁹⁸.
const LOWEST: i32 = -320;

/// Bits of a digit that has no carries.
const DIGIT_BITS: u32 = 32;

/// Digits up to 2³²⁰: the square of the largest `f32` is below 2²⁵⁶.
const NUM_DIGITS: usize = 20;

/// Terms that are cut at the same bit.
const NUM_TERMS: usize = 1024;

/// Sums that are formed side by side in vectors.
const LANES: usize = 16;

/// A sum of numbers, exact until it is read. It holds squares and values of `f32`. A sum with a term
/// that is NaN is NaN, else one with an infinite square is infinite.
///
/// If the words of several sums are added as integers, the result is a sum of all their terms: its
/// [`value`](ExactSum::value) does not depend on how the terms were divided, its words do.
#[derive(Debug, Clone, Copy, Zeroable, Pod)]
#[repr(C)]
pub struct ExactSum {
    /// Digit i counts multiples of 2^(32 · i − 320), with a sign and carries in its upper half.
    digits: [i64; NUM_DIGITS],
    /// More than 0 if there is a term that is infinite.
    infinite: i64,
    /// More than 0 if there is a term that is NaN.
    not_a_number: i64,
}

impl Default for ExactSum {
    fn default() -> ExactSum {
        ExactSum::zeroed()
    }
}

impl AddAssign for ExactSum {
    fn add_assign(&mut self, mut other: ExactSum) {
        self.words_mut().iter_mut().zip(other.words_mut()).for_each(|(word, other)| *word += *other);
    }
}

impl ExactSum {
    /// The number of words.
    pub const NUM_WORDS: usize = NUM_DIGITS + 2;

    /// Returns the words, which may be added to those of other sums, for instance by an all-reduce.
    pub fn words_mut(&mut self) -> &mut [i64] {
        bytemuck::cast_slice_mut(std::slice::from_mut(self))
    }

    /// Carries what digits have above their 32 bits to the next ones, so that the words of many sums can be
    /// added up, even as `f64`.
    pub fn carry(&mut self) {
        carry(&mut self.digits);
    }

    /// Adds a multiple of 2⁻³²⁰ below 2²⁸⁸, or +∞ or NaN; −∞ counts as NaN. At most 2³¹ terms may be added.
    ///
    /// # Panics
    /// The term is finite, but no such multiple.
    pub fn add(&mut self, term: f64) {
        if term == f64::INFINITY {
            self.infinite += 1;
        } else if !term.is_finite() {
            self.not_a_number += 1;
        } else if term != 0.0 {
            let bits = term.abs().to_bits();
            let (exponent, fraction) = ((bits >> 52) as i32, bits & ((1 << 52) - 1));
            let mantissa = fraction | u64::from(exponent > 0) << 52;
            let zeros = mantissa.trailing_zeros();
            let mantissa = mantissa >> zeros;
            let place = exponent.max(1) - 1075 + zeros as i32 - LOWEST;
            let is_held = place >= 0 && place + mantissa.ilog2() as i32 + LOWEST < 288;
            assert!(is_held, "{term} does not fit an exact sum");
            let (digit, shift) = (place as u32 / DIGIT_BITS, place as u32 % DIGIT_BITS);
            let mut rest = u128::from(mantissa) << shift;
            for word in &mut self.digits[digit as usize..] {
                if rest == 0 {
                    break;
                }
                let low = (rest & ((1 << DIGIT_BITS) - 1)) as i64;
                *word += if term < 0.0 { -low } else { low };
                rest >>= DIGIT_BITS;
            }
        }
    }

    /// Adds the squares of at most 2⁴⁰ `values`. Inlined, so that it uses the vectors that its caller
    /// is compiled for.
    #[inline(always)]
    pub fn add_squares(&mut self, values: &[f32]) {
        let mut exponent = 1;
        for values in values.chunks(NUM_SQUARES) {
            let (lines, rest) = values.as_chunks();
            if !self.add_sections(lines, &mut exponent) {
                self.add_any_squares(lines.as_flattened());
            }
            self.add_any_squares(rest);
        }
    }

    /// Adds the squares of at most [`NUM_SQUARES`] values in sections. `exponent` is that in the bits of the
    /// largest value, as far as is known, and is corrected if that is necessary. Returns false, and adds
    /// nothing, if sections do not hold the squares.
    #[inline(always)]
    fn add_sections(&mut self, values: &[[f32; LANES]], exponent: &mut u64) -> bool {
        for _ in 0..2 {
            let squares = SectionedSquares::new(values, *exponent);
            if squares.are_exact && squares.exponent <= *exponent {
                squares.sums.into_iter().for_each(|sum| self.add(sum));
                return true;
            }
            let found = squares.exponent.max(1);
            if found == NOT_FINITE || found == *exponent {
                return false;
            }
            *exponent = found;
        }
        false
    }

    /// Adds squares of any magnitudes.
    #[inline(always)]
    fn add_any_squares(&mut self, values: &[f32]) {
        if values.is_empty() {
            return;
        }
        let mut terms = [0.0; NUM_TERMS];
        for values in values.chunks(NUM_TERMS) {
            let len = values.len().next_multiple_of(LANES);
            let terms = &mut terms[..len];
            terms[values.len()..].fill(0.0);
            for (term, value) in terms.iter_mut().zip(values) {
                // exact: two factors of 24 bits
                *term = f64::from(*value) * f64::from(*value);
            }
            self.add_terms(terms.as_chunks_mut().0);
        }
    }

    /// Adds at most [`NUM_TERMS`] terms, which are overwritten.
    #[inline(always)]
    fn add_terms(&mut self, terms: &mut [[f64; LANES]]) {
        let mut largest = [0; LANES];
        for terms in &*terms {
            keep_largest(terms, &mut largest);
        }
        loop {
            let largest_bits = largest.iter().copied().max().unwrap_or(0);
            if largest_bits == 0 {
                return;
            }
            let largest_term = f64::from_bits(largest_bits as u64);
            if !largest_term.is_finite() {
                return self.add(largest_term);
            }
            // Terms are below 2^(exponent + 1), so 1024 of them are below 2^(exponent + 11): their
            // multiples of 2^(exponent − 42) add up without rounding. Adding and subtracting 1.5 ·
            // 2^(52 + u) rounds a number to a multiple of 2^u.
            let exponent = (largest_bits >> 52) as u64;
            let cut = 1.5 * f64::from_bits((exponent + 10) << 52);
            let mut sums = [0.0; LANES];
            largest = [0; LANES];
            for terms in &mut *terms {
                for (term, sum) in terms.iter_mut().zip(&mut sums) {
                    let upper = (*term + cut) - cut;
                    *term -= upper;
                    *sum += upper;
                }
                keep_largest(terms, &mut largest);
            }
            self.add(sums.iter().sum());
        }
    }

    /// Returns the sum, rounded to the nearest `f64`.
    pub fn value(&self) -> f64 {
        if self.not_a_number > 0 {
            return f64::NAN;
        }
        if self.infinite > 0 {
            return f64::INFINITY;
        }
        let mut digits = self.digits;
        let is_negative = carry(&mut digits) < 0;
        if is_negative {
            digits = self.digits.map(|digit| -digit);
            carry(&mut digits);
        }
        let Some(top) = digits.iter().rposition(|digit| *digit != 0) else { return 0.0 };
        // four digits hold more bits than an `f64`; a bit below stands for all lower digits
        let bottom = top.saturating_sub(3);
        let upper =
            digits[bottom..=top].iter().rev().fold(0, |sum, digit| sum << DIGIT_BITS | *digit as u128);
        let sticky = u128::from(digits[..bottom].iter().any(|digit| *digit != 0));
        let power = LOWEST + (DIGIT_BITS as usize * bottom) as i32;
        let magnitude = (upper | sticky) as f64 * 2_f64.powi(power);
        if is_negative { -magnitude } else { magnitude }
    }
}

/// Sections of squares that are cut at fixed bits: three hold all bits of squares whose roots differ by less
/// than a factor of 2³⁷.
const NUM_SECTIONS: usize = 3;

/// Squares that are cut at the same bits.
const NUM_SQUARES: usize = 4096;

/// The bits of a section. It leaves of a square at most half its lowest bit, so that 4096 multiples of a bit
/// 2⁻⁴¹ times as large add up without rounding.
const SECTION_BITS: u64 = 41;

/// The bias of an exponent in the bits of an `f32` and of an `f64`.
const BIAS: [u64; 2] = [127, 1023];

/// The exponent in the bits of an `f32` that is infinite or NaN.
const NOT_FINITE: u64 = 255;

/// The squares of some values, as the sums of sections of their bits. They are cut in registers, in one pass.
struct SectionedSquares {
    sums: [f64; NUM_SECTIONS],
    /// True if the sections are all there is of squares whose roots have at most the expected exponent.
    are_exact: bool,
    /// The exponent in the bits of the largest value.
    exponent: u64,
}

impl SectionedSquares {
    /// Squares at most [`NUM_SQUARES`] values. `exponent`, at least 1, is that of the largest, as expected.
    #[inline(always)]
    fn new(values: &[[f32; LANES]], exponent: u64) -> SectionedSquares {
        // 4096 squares are below 2^(53 + u) with u = 2 · exponent - 293, and a cut is 1.5 · 2^(52 + u)
        let top = 2 * exponent + 1 + BIAS[1] - 2 * BIAS[0] + 12;
        let cuts: [f64; NUM_SECTIONS] = std::array::from_fn(|section| {
            let below = SECTION_BITS * section as u64;
            1.5 * f64::from_bits((top - below) << 52)
        });
        let mut sums = [[0.0; LANES]; NUM_SECTIONS];
        let (mut rests, mut largest) = ([0; LANES], [0; LANES]);
        for values in values {
            for lane in 0..LANES {
                let value = f64::from(values[lane]);
                let mut rest = value * value;
                for (cut, sums) in cuts.iter().zip(&mut sums) {
                    let upper = (rest + cut) - cut;
                    rest -= upper;
                    sums[lane] += upper;
                }
                rests[lane] |= rest.abs().to_bits();
                largest[lane] = values[lane].abs().to_bits().max(largest[lane]);
            }
        }
        SectionedSquares {
            sums: sums.map(|sums| sums.iter().sum()),
            are_exact: rests.iter().all(|rest| *rest == 0),
            exponent: largest.into_iter().max().map_or(0, |largest| u64::from(largest >> 23)),
        }
    }
}

/// Keeps in `largest` the bits of the largest magnitudes, of which NaN and infinity are the largest.
#[inline(always)]
fn keep_largest(terms: &[f64; LANES], largest: &mut [i64; LANES]) {
    for (term, largest) in terms.iter().zip(largest) {
        *largest = (*largest).max((term.to_bits() & !(1 << 63)) as i64);
    }
}

/// Leaves in each digit but the highest its lower half, and returns the highest, which has the sign.
fn carry(digits: &mut [i64; NUM_DIGITS]) -> i64 {
    let mut carried = 0;
    for digit in &mut digits[..NUM_DIGITS - 1] {
        *digit += carried;
        carried = *digit >> DIGIT_BITS;
        *digit &= (1 << DIGIT_BITS) - 1;
    }
    digits[NUM_DIGITS - 1] += carried;
    digits[NUM_DIGITS - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(terms: &[f64]) -> f64 {
        let mut sum = ExactSum::default();
        terms.iter().for_each(|term| sum.add(*term));
        sum.value()
    }

    #[test]
    fn a_sum_is_rounded_once() {
        assert_eq!(sum(&[]), 0.0);
        assert_eq!(sum(&[1.0, 2_f64.powi(-52), -1.0]), 2_f64.powi(-52));
        assert_eq!(sum(&[1e70, 1.0, -1e70]), 1.0);
        assert_eq!(sum(&[2_f64.powi(-298), 2_f64.powi(250), -2_f64.powi(250)]), 2_f64.powi(-298));
        assert_eq!(sum(&[-3.5, 1.25]), -2.25);
        // halfway between two numbers of f64 is rounded to the even one, a little more upwards
        let half = 2_f64.powi(-53);
        assert_eq!(sum(&[1.0, half]), 1.0);
        assert_eq!(sum(&[1.0, half, 2_f64.powi(-290)]), 1.0 + f64::EPSILON);
        assert_eq!(sum(&[1.0, half, -2_f64.powi(-290)]), 1.0);
        assert!(sum(&[1.0, f64::NAN]).is_nan() && sum(&[f64::INFINITY, f64::NAN]).is_nan());
        assert_eq!(sum(&[1.0, f64::INFINITY]), f64::INFINITY);
    }

    #[test]
    #[should_panic(expected = "does not fit")]
    fn a_term_below_the_lowest_bit_is_refused() {
        sum(&[2_f64.powi(-321)]);
    }

    #[test]
    fn squares_of_every_magnitude_add_up_in_any_order_and_parts() {
        let random = |i: u32| i.wrapping_mul(2_654_435_761);
        let any = |i| f32::from_bits(random(i) & 0x7f7f_ffff);
        let gradient = |i| (random(i) % 2001) as f32 * 1e-6 - 1e-3;
        let subnormal = |i| f32::from_bits(random(i) & 0x007f_ffff);
        let mixed = |i| if i % 2 == 0 { gradient(i) * 1e18 } else { gradient(i) * 1e-17 };
        // one magnitude after the other, as the gradients of one tensor after the other
        let changing = |i: u32| gradient(i) * [1.0, 1e-15, 1e-35, 1e18][(i / 4000) as usize % 4];
        let sets: [&dyn Fn(u32) -> f32; 5] = [&any, &gradient, &subnormal, &mixed, &changing];
        for values in sets {
            let values: Vec<f32> = (0..18_000).map(values).collect();
            let mut expected = ExactSum::default();
            values.iter().for_each(|value| expected.add(f64::from(*value) * f64::from(*value)));
            carry(&mut expected.digits);
            for part in [1, 7, 1024, 1500, 5000, 18_000] {
                for reverse in [false, true] {
                    let mut all = ExactSum::default();
                    for values in values.chunks(part) {
                        let mut values = values.to_vec();
                        if reverse {
                            values.reverse();
                        }
                        let mut sum = ExactSum::default();
                        sum.add_squares(&values);
                        all += sum;
                    }
                    assert_eq!(all.value().to_bits(), expected.value().to_bits(), "parts of {part}");
                    carry(&mut all.digits);
                    assert_eq!(all.digits, expected.digits, "parts of {part}");
                }
            }
        }
        let squares = |values: &[f32]| {
            let mut sum = ExactSum::default();
            sum.add_squares(values);
            sum.value()
        };
        for (value, expected) in [(f32::NEG_INFINITY, f64::INFINITY), (f32::NAN, f64::NAN)] {
            for at in [0, 20, 4095] {
                let mut values = vec![1.0; 4096];
                values[at] = value;
                assert_eq!(squares(&values).to_bits(), expected.to_bits(), "{value} at {at}");
            }
        }
        for value in [f32::MAX, f32::from_bits(1)] {
            // a power of two times a square has no other bits
            assert_eq!(squares(&[value; 4096]), 4096.0 * f64::from(value) * f64::from(value));
        }
        assert_eq!(squares(&[1.0, f32::NEG_INFINITY]), f64::INFINITY);
        assert!(squares(&[f32::NAN, f32::INFINITY]).is_nan());
    }
}
