//! The element types and reductions that messages are made of.

use mpi::collective::SystemOperation;
use mpi::datatype::Equivalence;

/// A type that a message can carry: `f32`, `f64`, `i32`, `i64` or `u8`.
pub trait Element: Equivalence + bytemuck::Pod + Default + PartialOrd + Send + sealed::Sealed {
    /// `accumulator[i] = accumulator[i] operation values[i]`, with the result of MPI's operation of that name.
    fn fold(operation: Operation, accumulator: &mut [Self], values: &[Self]);
}

/// How a reduction combines two elements (MPI-4.1 §6.9.2).
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

impl Operation {
    pub(super) fn to_mpi(self) -> SystemOperation {
        match self {
            Operation::Sum => SystemOperation::sum(),
            Operation::Product => SystemOperation::product(),
            Operation::Min => SystemOperation::min(),
            Operation::Max => SystemOperation::max(),
        }
    }
}

mod sealed {
    /// Only the types that MPI and this crate both know.
    pub trait Sealed {}
}

macro_rules! element {
    ($type:ty, $add:expr, $multiply:expr, $min:expr, $max:expr) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
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

/// Least and largest are those of IEEE 754-2019 (`minimum`, `maximum`): what is no number spoils them, and −0 is less than 0. So they
/// are the same in every order of the ranks.
macro_rules! float {
    ($type:ty) => {
        element!(
            $type,
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
    ($type:ty) => {
        element!($type, <$type>::wrapping_add, <$type>::wrapping_mul, Ord::min, Ord::max);
    };
}

float!(f32);
float!(f64);
integer!(i32);
integer!(i64);
integer!(u8);
