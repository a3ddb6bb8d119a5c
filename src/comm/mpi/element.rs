//! MPI's datatypes and reductions for [`ElementType`] and [`Operation`].

use ::mpi::collective::SystemOperation;
use ::mpi::datatype::Equivalence as _;
use ::mpi::ffi;
use ::mpi::traits::AsRaw as _;

use crate::memory::{ElementType, Operation};

/// Returns MPI's predefined datatype for `element`. MPI has none for bfloat16, which travels as
/// integers of two bytes.
pub(super) fn datatype(element: ElementType) -> ffi::MPI_Datatype {
    match element {
        ElementType::F32 => f32::equivalent_datatype().as_raw(),
        ElementType::F64 => f64::equivalent_datatype().as_raw(),
        ElementType::I32 => i32::equivalent_datatype().as_raw(),
        ElementType::I64 => i64::equivalent_datatype().as_raw(),
        ElementType::U8 => u8::equivalent_datatype().as_raw(),
        ElementType::Bf16 => u16::equivalent_datatype().as_raw(),
    }
}

/// Returns MPI's predefined reduction for `operation`.
pub(super) fn reduction(operation: Operation) -> ffi::MPI_Op {
    match operation {
        Operation::Sum => SystemOperation::sum().as_raw(),
        Operation::Product => SystemOperation::product().as_raw(),
        Operation::Min => SystemOperation::min().as_raw(),
        Operation::Max => SystemOperation::max().as_raw(),
    }
}
