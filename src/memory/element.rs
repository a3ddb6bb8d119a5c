//! Element types of buffers and messages, and the reductions over them.

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
    /// Returns the number of bytes of one element.
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
    /// The [`ElementType`] of this type.
    const TYPE: ElementType;

    /// Computes `accumulator[i] = accumulator[i] operation values[i]`. Integers wrap around. A minimum or
    /// maximum of floats is NaN if a term is, and −0 is less than 0; MPI's operations of these names leave
    /// both open.
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

/// Minimum and maximum are those of IEEE 754-2019 (`minimum`, `maximum`): NaN propagates, and −0 is
/// less than 0, so the result does not depend on the order of the ranks.
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
