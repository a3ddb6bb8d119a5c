//! Counts above what a C `int` holds: a longer message travels as *one* message of a derived datatype, so that matching, ordering
//! and short receives stay MPI's.

use std::ffi::c_int;

use mpi::datatype::{Equivalence, UncommittedUserDatatype, UserDatatype};
use mpi::ffi;
use mpi::traits::AsRaw;

/// `count` elements as MPI counts them: some number of some datatype.
pub(super) struct Extent {
    pub(super) datatype: ffi::MPI_Datatype,
    pub(super) count: c_int,
    /// Freed on drop, which MPI delays until pending operations on it are complete (MPI-4.1 §5.1.9).
    _derived: Option<UserDatatype>,
}

impl Extent {
    /// `count` elements, where MPI counts up to `limit`.
    pub(super) fn new<T: Equivalence>(count: usize, limit: usize) -> Extent {
        let element = T::equivalent_datatype();
        if count <= limit {
            return Extent { datatype: element.as_raw(), count: count as c_int, _derived: None };
        }
        let block = UncommittedUserDatatype::contiguous(limit as c_int, &element);
        let whole = UncommittedUserDatatype::contiguous((count / limit) as c_int, &block);
        let rest = UncommittedUserDatatype::contiguous((count % limit) as c_int, &element);
        let start_of_rest = (count / limit * limit * size_of::<T>()) as mpi::Address;
        let derived =
            UserDatatype::structured(&[1, 1], &[0, start_of_rest], &[whole.as_ref(), rest.as_ref()]);
        Extent { datatype: derived.as_raw(), count: 1, _derived: Some(derived) }
    }
}
