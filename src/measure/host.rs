//! [`HostSubject`]: an operation on host memory.

use super::buffers::{Geometry, HostBuffers};
use super::{CallForm, Meanwhile, Measured, Subject, value};
use crate::Result;
use crate::comm::{Algorithm, Call, Choice, Communicator};
use crate::memory::{ElementType, Memory};

/// An operation on buffers in host memory, of `f32`.
pub struct HostSubject<'a> {
    communicator: &'a Communicator,
    operation: Measured,
    form: CallForm,
    geometry: Geometry,
    /// `None` while a run has them.
    buffers: Option<HostBuffers>,
}

impl<'a> HostSubject<'a> {
    /// Allocates buffers for `operation` on `len` elements; `None` if it does not have this form.
    /// Collective.
    ///
    /// # Errors
    /// There is no memory for the buffers.
    pub fn new(
        communicator: &'a Communicator,
        operation: Measured,
        form: CallForm,
        len: usize,
    ) -> Result<Option<HostSubject<'a>>> {
        if !(operation.exists)(form) {
            return Ok(None);
        }
        let received = if form.is_in_place { 0 } else { len };
        let buffers = HostBuffers { send: Memory::zeroed(len)?, receive: Memory::zeroed(received)? };
        let geometry = Geometry::new(communicator, len);
        Ok(Some(HostSubject { communicator, operation, form, geometry, buffers: Some(buffers) }))
    }

    /// Writes the values that `value_at` returns to the buffer, and NaN where the result will be.
    pub(super) fn fill_with(&mut self, value_at: &dyn Fn(usize) -> f32) {
        if let Some(HostBuffers { send, receive }) = &mut self.buffers {
            receive.fill(f32::NAN);
            send.iter_mut().enumerate().for_each(|(at, into)| *into = value_at(at));
        }
    }

    /// Returns the buffer that holds the result after a run.
    pub(super) fn result(&self) -> &[f32] {
        match &self.buffers {
            Some(buffers) if self.form.is_in_place => &buffers.send,
            Some(buffers) => &buffers.receive,
            None => &[],
        }
    }
}

impl Subject for HostSubject<'_> {
    fn fill(&mut self) -> Result<()> {
        let rank = self.geometry.rank;
        self.fill_with(&|at| value(rank, at));
        Ok(())
    }

    fn run(&mut self, choice: Option<Choice>, meanwhile: Meanwhile<'_>) -> Result<Algorithm> {
        let HostSubject { operation, form, geometry, .. } = *self;
        let mut buffers = self.buffers.take().expect("a run gives the buffers back");
        let chosen = choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        let call = if form.is_blocking {
            (operation.run)(all, &geometry, &mut buffers)?;
            meanwhile(&mut || Ok(()))?;
            Call::Blocking
        } else {
            buffers = (operation.start)(all, &geometry, form, buffers, meanwhile)?;
            Call::Started
        };
        self.buffers = Some(buffers);
        let algorithm = |collective| all.choice(collective, call, geometry.len, ElementType::F32).algorithm;
        Ok((operation.planned)(form).map_or(Algorithm::Mpi, algorithm))
    }

    fn wrong(&mut self) -> Result<u64> {
        let (found, geometry) = (self.result(), &self.geometry);
        let is_wrong = |at: &usize| found[*at] != (self.operation.expected)(geometry, *at);
        Ok((self.operation.received)(geometry).filter(is_wrong).count() as u64)
    }
}
