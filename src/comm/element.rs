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
    ($type:ty, $add:expr, $multiply:expr) => {
        impl sealed::Sealed for $type {}

        impl Element for $type {
            fn fold(operation: Operation, accumulator: &mut [$type], values: &[$type]) {
                let pairs = accumulator.iter_mut().zip(values);
                match operation {
                    Operation::Sum => pairs.for_each(|(a, &b)| *a = $add(*a, b)),
                    Operation::Product => pairs.for_each(|(a, &b)| *a = $multiply(*a, b)),
                    Operation::Min => pairs.for_each(|(a, &b)| *a = if b < *a { b } else { *a }),
                    Operation::Max => pairs.for_each(|(a, &b)| *a = if b > *a { b } else { *a }),
                }
            }
        }
    };
}

element!(f32, |a: f32, b: f32| a + b, |a: f32, b: f32| a * b);
element!(f64, |a: f64, b: f64| a + b, |a: f64, b: f64| a * b);
element!(i32, i32::wrapping_add, i32::wrapping_mul);
element!(i64, i64::wrapping_add, i64::wrapping_mul);
element!(u8, u8::wrapping_add, u8::wrapping_mul);
