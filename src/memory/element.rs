//! Element types of buffers and messages, and the reductions over them.

use half::bf16;

use super::Terms;

/// The type of a buffer's elements, known at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// `f32`.
    F32,
    /// `f64`.
    F64,
    /// `i32`.
    I32,
    /// `i64`.
    I64,
    /// `u8`.
    U8,
    /// bfloat16, in which devices keep activations. Its sums are formed in `f32` and rounded once.
    Bf16,
}

impl ElementType {
    /// The bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::F64 | ElementType::I64 => 8,
            ElementType::F32 | ElementType::I32 => 4,
            ElementType::Bf16 => 2,
            ElementType::U8 => 1,
        }
    }
}

/// A type that a host message can carry: `f32`, `f64`, `i32`, `i64` or `u8`.
pub trait Element: bytemuck::Pod + Default + PartialOrd + Send + sealed::Sealed {
    /// The same type as a value.
    const TYPE: ElementType;

    /// `accumulator[i] = accumulator[i] operation values[i]`, with the result of MPI's operation of that name.
    fn fold(operation: Operation, accumulator: &mut [Self], values: &[Self]);
}

/// A reduction of two elements to one (MPI-4.1 §6.9.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// `MPI_SUM`.
    Sum,
    /// `MPI_PROD`.
    Product,
    /// `MPI_MIN`.
    Min,
    /// `MPI_MAX`.
    Max,
}

mod sealed {
    /// Restricts [`Element`](super::Element) to the types that MPI and this crate both know.
    pub trait Sealed {}
}

macro_rules! element {
    ($type:ty, $name:ident, $add:expr, $multiply:expr, $min:expr, $max:expr) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const TYPE: ElementType = ElementType::$name;

            fn fold(operation: Operation, accumulator: &mut [$type], values: &[$type]) {
                let pairs = accumulator.iter_mut().zip(values);
                match operation {
                    Operation::Sum => pairs.for_each(|(a, &b)| *a = $add(*a, b)),
                    Operation::Product => pairs.for_each(|(a, &b)| *a = $multiply(*a, b)),
                    Operation::Min => pairs.for_each(|(a, &b)| *a = $min(*a, b)),
                    Operation::Max => pairs.for_each(|(a, &b)| *a = $max(*a, b)),
                }
            }
        }
    };
}

/// Minimum and maximum are those of IEEE 754-2019 (`minimum`, `maximum`): NaN propagates, and −0 is less
/// than 0, so the result does not depend on the order of the ranks.
macro_rules! float {
    ($type:ty, $name:ident) => {
        element!(
            $type,
            $name,
            |a: $type, b: $type| a + b,
            |a: $type, b: $type| a * b,
            |a: $type, b: $type| {
                let takes_second = b < a || b.is_nan() || (a == b && b.is_sign_negative());
                if takes_second && !a.is_nan() { b } else { a }
            },
            |a: $type, b: $type| {
                let takes_second = b > a || b.is_nan() || (a == b && b.is_sign_positive());
                if takes_second && !a.is_nan() { b } else { a }
            }
        );
    };
}

macro_rules! integer {
    ($type:ty, $name:ident) => {
        element!($type, $name, <$type>::wrapping_add, <$type>::wrapping_mul, Ord::min, Ord::max);
    };
}

float!(f32, F32);
float!(f64, F64);
integer!(i32, I32);
integer!(i64, I64);
integer!(u8, U8);

/// Combines `own` with the terms in `inbox`, in rank order, block by block so that the block stays in cache.
pub(super) fn fold_terms<T: Element>(own: &mut [T], inbox: &mut [T], terms: &Terms, operation: Operation) {
    const BLOCK: usize = 4096;
    let len = own.len();
    for start in (0..len).step_by(BLOCK) {
        let end = len.min(start + BLOCK);
        let term = |index: usize| index * terms.stride + start..index * terms.stride + end;
        let own = &mut own[start..end];
        // the terms before this rank's own in order, then that (a + b is b + a to the bit), then the others
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

/// Adds the terms in `inbox` to `own` in rank order, in `f32`, and rounds each sum once to the nearest
/// bfloat16, ties to even, as a device does.
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
}
