//! Sums, products, minima and maxima of a buffer's elements and the terms that have arrived.

use half::bf16;

use super::arena::Terms;
use super::element::{Element, Operation};

/// Combines `own` with the terms in `inbox`, in rank order, block by block so that the block stays
/// in cache.
pub(super) fn fold_terms<T: Element>(own: &mut [T], inbox: &mut [T], terms: &Terms, operation: Operation) {
    const BLOCK: usize = 4096;
    let len = own.len();
    for start in (0..len).step_by(BLOCK) {
        let end = len.min(start + BLOCK);
        let term = |index: usize| index * terms.stride + start..index * terms.stride + end;
        let own = &mut own[start..end];
        // the terms before this rank's own in order, then its own (a + b has the bits of b + a),
        // then the others
        if terms.own > 0 {
            for index in 1..terms.own {
                let (first, later) = inbox.split_at_mut(terms.stride);
                let from = term(index - 1);
                T::fold(operation, &mut first[start..end], &later[from]);
            }
            T::fold(operation, own, &inbox[start..end]);
        }
        for index in terms.own..terms.count {
            T::fold(operation, own, &inbox[term(index)]);
        }
    }
}

/// Adds the terms in `inbox` to `own` in rank order, in `f32`, and rounds each sum once to the
/// nearest bfloat16, ties to even.
pub(super) fn add_bf16_terms(own: &mut [bf16], inbox: &[bf16], terms: &Terms) {
    const BLOCK: usize = 1024;
    let mut sums = [0.0_f32; BLOCK];
    for (number, own) in own.chunks_mut(BLOCK).enumerate() {
        let sums = &mut sums[..own.len()];
        // −0 is the identity of addition, signed zeros included
        sums.fill(-0.0);
        let mut add = |term: &[bf16]| sums.iter_mut().zip(term).for_each(|(sum, term)| *sum += term.to_f32());
        let term = |index: usize| &inbox[index * terms.stride + number * BLOCK..];
        (0..terms.own).for_each(|index| add(term(index)));
        add(own);
        (terms.own..terms.count).for_each(|index| add(term(index)));
        own.iter_mut().zip(sums).for_each(|(own, sum)| *own = bf16::from_f32(*sum));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_bfloat16_are_rounded_once_to_even_and_nan_stays_where_it_is() {
        let values = |all: &[f32]| all.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>();
        let mut own = values(&[1.0, f32::NAN, -0.0, 1.0]);
        // 1 + 1/256 + 1/256 is representable, 1 + 1/256 is half way between two numbers
        let inbox = values(&[1.0 / 256.0, 1.0, -0.0, 1.0 / 256.0, 1.0 / 256.0, 1.0, -0.0, 0.0]);
        let terms = Terms { range: 0..4, first: 0, count: 2, stride: 4, own: 1 };
        add_bf16_terms(&mut own, &inbox, &terms);
        assert_eq!(own[0].to_f32(), 1.0 + 1.0 / 128.0);
        assert!(own[1].is_nan());
        assert_eq!(own[2].to_bits(), 0x8000);
        assert_eq!(own[3].to_f32(), 1.0);
    }

    #[test]
    fn sums_of_bfloat16_are_in_rank_order() {
        // one after the other in bfloat16, 256 + 1 would stay 256 each time
        let (one, large) = (bf16::from_f32(1.0), bf16::from_f32(256.0));
        for own in 0..=3 {
            let mut sum = vec![if own == 0 { large } else { one }; 3000];
            let mut inbox = vec![one; 3 * 3001];
            if own > 0 {
                inbox[..3000].fill(large);
            }
            let terms = Terms { range: 0..3000, first: 0, count: 3, stride: 3001, own };
            add_bf16_terms(&mut sum, &inbox, &terms);
            // 259 is halfway between 258 and 260
            assert!(sum.iter().all(|&sum| sum.to_f32() == 260.0), "{own}");
        }
    }
}
