//! Random permutations that need no table.

/// A permutation of `0..len` whose elements are computed one by one, without a table: a Feistel
/// network on the smallest even number of bits that holds `len`, applied repeatedly until the
/// result is below `len` (J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
/// 2002, §4).
pub(super) struct Permutation {
    len: u64,
    /// Half of the network's bits.
    half_bits: u32,
    keys: [u64; Permutation::ROUNDS],
}

impl Permutation {
    const ROUNDS: usize = 6;

    /// Creates the permutation of `0..len` that `key` chooses.
    pub(super) fn new(len: u64, key: u64) -> Permutation {
        let bits = u64::BITS - (len.max(2) - 1).leading_zeros();
        let keys = std::array::from_fn(|round| mix(key.wrapping_add(round as u64 + 1)));
        Permutation { len, half_bits: bits.div_ceil(2), keys }
    }

    /// Returns the element at `index`.
    pub(super) fn at(&self, index: u64) -> u64 {
        let mut value = index;
        loop {
            value = self.encrypt(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn encrypt(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every
/// output bit.
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}
