//! Operations on host memory.

use super::{Form, Meanwhile, Measured, Subject, expected, value};
use crate::Result;
use crate::comm::{Algorithm, Call, Choice, Communicator, Operation, Pending};
use crate::memory::{ElementType, Memory};

/// An operation on buffers in host memory, of `f32`.
pub struct HostSubject<'a> {
    communicator: &'a Communicator,
    operation: Measured,
    form: Form,
    len: usize,
    send: Option<Memory<f32>>,
    receive: Option<Memory<f32>>,
    choice: Option<Choice>,
}

impl<'a> HostSubject<'a> {
    /// Buffers for `operation` on `len` elements: nothing if it has no such form. Collective.
    ///
    /// # Errors
    /// There is no memory for the buffers.
    pub fn new(
        communicator: &'a Communicator,
        operation: Measured,
        form: Form,
        len: usize,
    ) -> Result<Option<HostSubject<'a>>> {
        let exists = match operation {
            Measured::Broadcast => form.is_in_place,
            Measured::AllReduce => !form.is_blocking || form.is_in_place,
            Measured::AllGather => !form.is_blocking || !form.is_in_place,
            Measured::ReduceScatter => form.is_blocking != form.is_in_place,
            _ => !form.is_in_place,
        };
        if !exists {
            return Ok(None);
        }
        let receive = if form.is_in_place { 0 } else { len };
        let (send, receive) = (Some(Memory::zeroed(len)?), Some(Memory::zeroed(receive)?));
        Ok(Some(HostSubject { communicator, operation, form, len, send, receive, choice: None }))
    }

    /// Puts these values into the buffer, and none where the result will be.
    pub(super) fn fill_with(&mut self, values: &[f32]) {
        self.receive.iter_mut().for_each(|memory| memory.fill(f32::NAN));
        self.send.iter_mut().for_each(|memory| memory.copy_from_slice(values));
    }

    /// Where the result is after a run.
    pub(super) fn result(&self) -> &[f32] {
        let result = if self.form.is_in_place { &self.send } else { &self.receive };
        result.as_ref().map_or(&[], |memory| memory.as_ref())
    }

    fn part(&self) -> usize {
        self.len / self.communicator.size()
    }

    /// Where this rank's part is.
    fn own(&self) -> std::ops::Range<usize> {
        self.communicator.rank() * self.part()..(self.communicator.rank() + 1) * self.part()
    }

    fn run_blocking(&mut self) -> Result<()> {
        let own = self.own();
        let chosen = self.choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        let (Some(send), Some(receive)) = (&mut self.send, &mut self.receive) else { return Ok(()) };
        let (rank, size) = (all.rank(), all.size());
        match self.operation {
            Measured::SendReceive => {
                all.send_receive(send, (rank + 1) % size, receive, (rank + size - 1) % size, 0)
            }
            Measured::Broadcast => all.broadcast(send, 0),
            Measured::Scatter => all.scatter(send, &mut receive[own], 0),
            Measured::Gather => all.gather(&send[own], receive, 0),
            Measured::AllGather => all.all_gather(&send[own], receive),
            Measured::AllToAll => all.all_to_all(send, receive),
            Measured::Reduce => all.reduce(send, receive, Operation::Sum, 0),
            Measured::AllReduce => all.all_reduce(send, Operation::Sum),
            Measured::ReduceScatter => all.reduce_scatter(send, &mut receive[own], Operation::Sum),
        }
    }

    fn run_started(&mut self, meanwhile: Meanwhile<'_>) -> Result<()> {
        let chosen = self.choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        let (rank, size) = (all.rank(), all.size());
        let (Some(send), Some(receive)) = (self.send.take(), self.receive.take()) else { return Ok(()) };
        let part = |memory: Memory<f32>| Part { memory, range: self.own() };
        let (send, receive) = match (self.operation, self.form.is_in_place) {
            (Measured::SendReceive, _) => {
                let mut receiving = all.start_receive(receive, (rank + size - 1) % size, 0)?;
                let mut sending = all.start_send(send, (rank + 1) % size, 0)?;
                meanwhile(&mut || {
                    receiving.test();
                    sending.test();
                    Ok(())
                })?;
                let receive = receiving.wait();
                (sending.wait(), receive)
            }
            (Measured::Broadcast, _) => (during(all.start_broadcast(send, 0)?, meanwhile)?, receive),
            (Measured::AllReduce, true) => {
                (during(all.start_all_reduce_in_place(send, Operation::Sum)?, meanwhile)?, receive)
            }
            (Measured::AllGather, true) => {
                (during(all.start_all_gather_in_place(send)?, meanwhile)?, receive)
            }
            (Measured::ReduceScatter, _) => {
                (during(all.start_reduce_scatter(send, Operation::Sum)?, meanwhile)?, receive)
            }
            (Measured::Scatter, _) => {
                let whole = Part { range: 0..self.len, memory: send };
                let (send, receive) = during(all.start_scatter(whole, part(receive), 0)?, meanwhile)?;
                (send.memory, receive.memory)
            }
            (Measured::Gather, _) => {
                let whole = Part { range: 0..self.len, memory: receive };
                let (send, receive) = during(all.start_gather(part(send), whole, 0)?, meanwhile)?;
                (send.memory, receive.memory)
            }
            (Measured::AllGather, false) => {
                let whole = Part { range: 0..self.len, memory: receive };
                let (send, receive) = during(all.start_all_gather(part(send), whole)?, meanwhile)?;
                (send.memory, receive.memory)
            }
            (Measured::AllToAll, _) => during(all.start_all_to_all(send, receive)?, meanwhile)?,
            (Measured::Reduce, _) => during(all.start_reduce(send, receive, Operation::Sum, 0)?, meanwhile)?,
            (Measured::AllReduce, false) => {
                during(all.start_all_reduce(send, receive, Operation::Sum)?, meanwhile)?
            }
        };
        (self.send, self.receive) = (Some(send), Some(receive));
        Ok(())
    }
}

/// Does `meanwhile` while `pending` is under way.
fn during<B>(mut pending: Pending<B>, meanwhile: Meanwhile<'_>) -> Result<B> {
    meanwhile(&mut || {
        pending.test();
        Ok(())
    })?;
    Ok(pending.wait())
}

/// A part of a buffer.
struct Part {
    memory: Memory<f32>,
    range: std::ops::Range<usize>,
}

impl AsRef<[f32]> for Part {
    fn as_ref(&self) -> &[f32] {
        &self.memory[self.range.clone()]
    }
}

impl AsMut<[f32]> for Part {
    fn as_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.range.clone()]
    }
}

// SAFETY: the elements are in the memory, which stays where it is; the range does not change.
#[allow(unsafe_code)]
unsafe impl crate::memory::HostBuffer for Part {
    type Element = f32;
}

impl Subject for HostSubject<'_> {
    fn fill(&mut self) -> Result<()> {
        let rank = self.communicator.rank();
        let values: Vec<f32> = (0..self.len).map(|at| value(rank, at)).collect();
        self.fill_with(&values);
        Ok(())
    }

    fn choose(&mut self, choice: Option<Choice>) {
        self.choice = choice;
    }

    fn algorithm(&self) -> Algorithm {
        let is_chosen =
            if self.form.is_blocking { self.operation != Measured::AllGather } else { self.form.is_in_place };
        let Some(collective) = self.operation.collective().filter(|_| is_chosen) else {
            return Algorithm::Mpi;
        };
        let call = if self.form.is_blocking { Call::Blocking } else { Call::Started };
        let chosen = self.choice.map(|choice| self.communicator.using(choice));
        let all = chosen.as_ref().unwrap_or(self.communicator);
        all.choice(collective, call, self.len, ElementType::F32).algorithm
    }

    fn run(&mut self, meanwhile: Meanwhile<'_>) -> Result<()> {
        self.run_once(meanwhile)
    }

    fn wrong(&mut self) -> Result<u64> {
        let (rank, size) = (self.communicator.rank(), self.communicator.size());
        let (range, expectation) = expected(self.operation, rank, size, self.len);
        let found = self.result();
        Ok(range.filter(|&at| found[at] != expectation.at(at, size)).count() as u64)
    }
}

impl HostSubject<'_> {
    fn run_once(&mut self, meanwhile: Meanwhile<'_>) -> Result<()> {
        if self.form.is_blocking {
            self.run_blocking()?;
            meanwhile(&mut || Ok(()))
        } else {
            self.run_started(meanwhile)
        }
    }
}
