//! The generator Philox4x32-10: J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as
//! easy as 1, 2, 3", SC 2011. Each block of four numbers is a function of a counter and a key.

/// The blocks that are computed at a time, side by side in vectors.
pub(super) const NUM_LANES: usize = 16;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Returns the numbers of the blocks `first` to `first + NUM_LANES`, in order. The counter of a block
/// is its number, then `upper`.
#[inline(always)]
pub(super) fn philox(first: u64, upper: [u32; 2], key: u64) -> [u32; 4 * NUM_LANES] {
    let mut counters = [[0_u32; NUM_LANES], [0; NUM_LANES], [upper[0]; NUM_LANES], [upper[1]; NUM_LANES]];
    let [a, b, c, d] = &mut counters;
    for (lane, (a, b)) in a.iter_mut().zip(b.iter_mut()).enumerate() {
        let block = first.wrapping_add(lane as u64);
        (*a, *b) = (block as u32, (block >> 32) as u32);
    }
    let mut key = [key as u32, (key >> 32) as u32];
    for _ in 0..10 {
        for (((a, b), c), d) in a.iter_mut().zip(b.iter_mut()).zip(c.iter_mut()).zip(d.iter_mut()) {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(*a);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(*c);
            *a = (second >> 32) as u32 ^ *b ^ key[0];
            *b = second as u32;
            *c = (first >> 32) as u32 ^ *d ^ key[1];
            *d = first as u32;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    let mut numbers = [0; 4 * NUM_LANES];
    let blocks = a.iter().zip(b.iter()).zip(c.iter()).zip(d.iter());
    for (into, (((a, b), c), d)) in numbers.chunks_exact_mut(4).zip(blocks) {
        into.copy_from_slice(&[*a, *b, *c, *d]);
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vectors of the authors' library, Random123.
    #[test]
    fn numbers_are_those_of_the_authors() {
        let zeros = philox(0, [0, 0], 0);
        assert_eq!(zeros[..4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox(u64::MAX, [u32::MAX; 2], u64::MAX);
        assert_eq!(ones[..4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox(0x85a3_08d3_243f_6a88, [0x1319_8a2e, 0x0370_7344], 0x299f_31d0_a409_3822);
        assert_eq!(pi[..4], [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }
}
