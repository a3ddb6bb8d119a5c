//! Counts above the largest C `int`: a longer message travels as *one* message of a derived
//! datatype, so that matching, ordering and short receives stay MPI's. The elements of a message that has
//! arrived are counted without that limit.
#![allow(unsafe_code)]

use std::ffi::c_int;

use ::mpi::datatype::{DatatypeRef, UncommittedUserDatatype, UserDatatype};
use ::mpi::ffi;
use ::mpi::raw::FromRaw as _;
use ::mpi::traits::AsRaw as _;

use super::element::datatype;
use crate::memory::ElementType;

/// A number of elements in MPI's terms: a count and a datatype.
pub(super) struct Extent {
    pub(super) datatype: ffi::MPI_Datatype,
    pub(super) count: c_int,
    /// Freed on drop, which MPI delays until pending operations on it are complete (MPI-4.1
    /// §5.1.9).
    _derived: Option<UserDatatype>,
}

impl Extent {
    /// Counts `count` elements, with counts of at most `limit`.
    pub(super) fn new(element: ElementType, count: usize, limit: usize) -> Extent {
        let predefined = datatype(element);
        if count <= limit {
            return Extent { datatype: predefined, count: count as c_int, _derived: None };
        }
        // SAFETY: the handle is that of a predefined datatype, which is never freed.
        let element_type = unsafe { DatatypeRef::from_raw(predefined) };
        let block = UncommittedUserDatatype::contiguous(limit as c_int, &element_type);
        let whole = UncommittedUserDatatype::contiguous((count / limit) as c_int, &block);
        let rest = UncommittedUserDatatype::contiguous((count % limit) as c_int, &element_type);
        let start_of_rest = (count / limit * limit * element.bytes()) as ::mpi::Address;
        let derived =
            UserDatatype::structured(&[1, 1], &[0, start_of_rest], &[whole.as_ref(), rest.as_ref()]);
        Extent { datatype: derived.as_raw(), count: 1, _derived: Some(derived) }
    }
}

/// Returns the number of elements in the message that `status` describes (`MPI_Get_elements_x`); `None` if
/// the message does not hold a whole number of them.
pub(super) fn num_elements(status: &ffi::MPI_Status, element: ElementType) -> Option<usize> {
    let mut num = 0;
    // SAFETY: MPI has filled the status, and the datatype is predefined.
    unsafe { ffi::MPI_Get_elements_x(status, datatype(element), &mut num) };
    // MPI_UNDEFINED is negative
    usize::try_from(num).ok()
}
