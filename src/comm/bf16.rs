//! Sums of bfloat16 on the host: the upper half of an `f32`.

use super::progress::Terms;

/// The same number.
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16, of two equally near the even one, as a device rounds.
fn round(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let bits = value.to_bits();
    let half = 0x7fff + (bits >> 16 & 1);
    (bits.wrapping_add(half) >> 16) as u16
}

/// Adds the terms in `inbox` to `own`, in order, in `f32`, a block at a time so that it stays in cache.
pub(super) fn add(own: &mut [u16], inbox: &[u16], terms: &Terms) {
    const BLOCK: usize = 1024;
    let mut sums = [0.0_f32; BLOCK];
    for (number, own) in own.chunks_mut(BLOCK).enumerate() {
        let sums = &mut sums[..own.len()];
        // what changes no number that is added to it, not even a zero's sign
        sums.fill(-0.0);
        let mut add = |term: &[u16]| sums.iter_mut().zip(term).for_each(|(sum, &term)| *sum += widen(term));
        let term = |index: usize| &inbox[index * terms.stride + number * BLOCK..];
        (0..terms.own).for_each(|index| add(term(index)));
        add(own);
        (terms.own..terms.count).for_each(|index| add(term(index)));
        own.iter_mut().zip(sums).for_each(|(own, sum)| *own = round(*sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_itself_and_halves_go_to_even() {
        for bits in 0..=u16::MAX {
            let value = widen(bits);
            assert!(
                if value.is_nan() { widen(round(value)).is_nan() } else { round(value) == bits },
                "{bits:#x}"
            );
        }
        // between 1 and the next, 1 + 1/128
        for (value, expected) in
            [(1.0 + 1.0 / 256.0, 1.0), (1.0 + 3.0 / 256.0, 1.0 + 2.0 / 128.0), (1.005, 1.0078125)]
        {
            assert_eq!(widen(round(value)), expected);
        }
        assert_eq!(widen(round(f32::MAX)), f32::INFINITY);
    }

    #[test]
    fn what_is_no_number_spoils_nothing_beside_it() {
        let [nan, infinite, minus_infinite, zero, minus_zero] =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0].map(round);
        let mut own = [nan, infinite, infinite, minus_zero, minus_zero];
        let inbox = [zero, infinite, minus_infinite, minus_zero, zero];
        add(&mut own, &inbox, &Terms { range: 0..5, count: 1, stride: 5, own: 1 });
        assert!(widen(own[0]).is_nan() && widen(own[2]).is_nan());
        assert_eq!((own[1], own[3], own[4]), (infinite, minus_zero, zero));
    }

    #[test]
    fn sums_are_rounded_once_and_in_order() {
        // one after the other in bfloat16, 256 + 1 would stay 256 each time
        let (one, large) = (round(1.0), round(256.0));
        for own in 0..=3 {
            let mut sum = vec![if own == 0 { large } else { one }; 3000];
            let mut inbox = vec![one; 3 * 3001];
            if own > 0 {
                inbox[..3000].fill(large);
            }
            add(&mut sum, &inbox, &Terms { range: 0..3000, count: 3, stride: 3001, own });
            // 259 is halfway between 258 and 260
            assert!(sum.iter().all(|&sum| widen(sum) == 260.0), "{own}");
        }
    }
}
