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
    tables: RefCell<Vec<(Constants, Rc<dyn Any>)>>,
}

impl SpecialisedKernels {
    pub(crate) fn new(capability: i32) -> SpecialisedKernels {
        SpecialisedKernels { capability, tables: RefCell::default() }
    }

    /// Returns the table of this type for `constants`, or `None` after a failure. A first call compiles it.
    pub(crate) fn of<T: KernelTable>(&self, streams: &Streams, constants: &Constants) -> Option<Rc<T>> {
        let known =
            self.tables.borrow().iter().find_map(|(of, table)| {
                if of == constants { Rc::clone(table).downcast().ok() } else { None }
            });
        known.or_else(|| {
            let compiled = compile(T::SOURCE, constants.clone(), self.capability);
            let module = compiled.and_then(|code| KernelModule::new(&streams.context, T::SOURCE, code));
            let table =
                module.and_then(|module| T::load(&module)).map_err(|error| streams.keep(error)).ok()?;
            let table = Rc::new(table);
            self.tables.borrow_mut().push((constants.clone(), Rc::clone(&table) as Rc<dyn Any>));
            Some(table)
        })
    }
}
