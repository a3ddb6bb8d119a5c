//! [`BitFold`], a checksum that counts the bits in which arrays differ.

use pulp::{Arch, Simd, WithSimd};

/// The number of words of a fold.
const WORDS: usize = 128;

/// The exclusive or of the words of an array, turned by as many bits as chunks precede them.
///
/// Arrays that differ in a few bits have folds that differ in as many, unless two of them meet in one
/// bit; one that differs in one bit always has another fold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitFold {
    words: [u32; WORDS],
    num_chunks: u32,
}

impl Default for BitFold {
    fn default() -> BitFold {
        BitFold { words: [0; WORDS], num_chunks: 0 }
    }
}

impl BitFold {
    /// The number of words of a fold in a message.
    pub const MESSAGE_LEN: usize = WORDS / 2 + 1;

    /// Returns the fold of `values`.
    pub fn of(values: &[f32]) -> BitFold {
        let mut fold = BitFold::default();
        fold.add(values);
        fold
    }

    /// Adds the next `values` of an array.
    pub fn add(&mut self, values: &[f32]) {
        Arch::new().dispatch(Addition { fold: self, values });
    }

    /// Adds the fold of another array, in any order of arrays.
    pub fn merge(&mut self, other: &BitFold) {
        self.words.iter_mut().zip(&other.words).for_each(|(word, other)| *word ^= other);
        self.num_chunks += other.num_chunks;
    }

    /// Returns the number of bits in which the folds differ.
    pub fn num_different_bits(&self, other: &BitFold) -> u32 {
        self.words.iter().zip(&other.words).map(|(one, two)| (one ^ two).count_ones()).sum()
    }

    /// Appends the fold to a message.
    pub fn write(&self, message: &mut Vec<i64>) {
        let pair = |words: &[u32; 2]| (u64::from(words[0]) | u64::from(words[1]) << 32) as i64;
        message.extend(self.words.as_chunks::<2>().0.iter().map(pair));
        message.push(i64::from(self.num_chunks));
    }

    /// Reads a fold from its [`BitFold::MESSAGE_LEN`] words in a message.
    pub fn read(message: &[i64]) -> BitFold {
        let mut fold = BitFold::default();
        for (words, pair) in fold.words.as_chunks_mut::<2>().0.iter_mut().zip(message) {
            *words = [*pair as u32, (*pair as u64 >> 32) as u32];
        }
        fold.num_chunks = message[WORDS / 2] as u32;
        fold
    }
}

/// The addition of values to a fold, compiled for the vectors of the processor.
struct Addition<'a> {
    fold: &'a mut BitFold,
    values: &'a [f32],
}

impl WithSimd for Addition<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let BitFold { words, num_chunks } = self.fold;
        let (whole, rest) = self.values.as_chunks::<WORDS>();
        for chunk in whole {
            let turn = *num_chunks % u32::BITS;
            words.iter_mut().zip(chunk).for_each(|(word, value)| *word ^= value.to_bits().rotate_left(turn));
            *num_chunks += 1;
        }
        if !rest.is_empty() {
            let turn = *num_chunks % u32::BITS;
            words.iter_mut().zip(rest).for_each(|(word, value)| *word ^= value.to_bits().rotate_left(turn));
            *num_chunks += 1;
        }
    }
}

/// Returns a number of bits in words.
pub fn num_bits(bits: u32) -> String {
    if bits == 1 { "1 bit".to_owned() } else { format!("{bits} bits") }
}

#[cfg(test)]
mod tests {
    use super::BitFold;

    #[test]
    fn folds_count_the_bits_that_differ() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
        let whole = BitFold::of(&values);
        for at in [0, 127, 128, 700, 999] {
            for bit in [0, 22, 31] {
                let mut other = values.clone();
                other[at] = f32::from_bits(other[at].to_bits() ^ 1 << bit);
                other[500] = f32::from_bits(other[500].to_bits() ^ 1 << 9);
                assert_eq!(whole.num_different_bits(&BitFold::of(&other)), 2, "bit {bit} of {at}");
            }
        }
        let mut swapped = values.clone();
        swapped.swap(3, 131);
        assert_ne!(BitFold::of(&swapped), whole, "values in other places");
        assert_ne!(BitFold::of(&values[..900]), whole);
        let mut message = Vec::new();
        whole.write(&mut message);
        assert_eq!(message.len(), BitFold::MESSAGE_LEN);
        assert_eq!(BitFold::read(&message), whole);
    }
}
