//! Kernels that are compiled for the sizes of a network.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

use super::compile::{Constants, compile};
use super::kernels::{KernelModule, KernelTable};
use super::streams::Streams;

/// The kernels of source files that are compiled for the sizes of a network, when they are first needed.
pub(crate) struct SpecialisedKernels {
    capability: i32,
    tables: RefCell<Vec<Specialised>>,
}

/// A table, with the sizes that it is for.
struct Specialised {
    key: Box<[u32]>,
    table: Rc<dyn Any>,
}

impl SpecialisedKernels {
    pub(crate) fn new(capability: i32) -> SpecialisedKernels {
        SpecialisedKernels { capability, tables: RefCell::default() }
    }

    /// Returns the table of this type for the sizes `key`, or `None` after a failure. A first call compiles
    /// it with `constants`, which need not be formed at every launch.
    pub(crate) fn of<T: KernelTable>(
        &self,
        streams: &Streams,
        key: &[u32],
        constants: impl FnOnce() -> Constants,
    ) -> Option<Rc<T>> {
        let of_key = |known: &Specialised| {
            if *known.key == *key { Rc::clone(&known.table).downcast().ok() } else { None }
        };
        let known = self.tables.borrow().iter().find_map(of_key);
        known.or_else(|| {
            let compiled = compile(T::SOURCE, constants(), self.capability);
            let module = compiled.and_then(|code| KernelModule::new(&streams.context, T::SOURCE, code));
            let table =
                module.and_then(|module| T::load(&module)).map_err(|error| streams.keep(error)).ok()?;
            let table = Rc::new(table);
            self.tables.borrow_mut().push(Specialised { key: key.into(), table: table.clone() });
            Some(table)
        })
    }
}
