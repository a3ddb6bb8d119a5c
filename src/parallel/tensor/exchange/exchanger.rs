//! [`Exchanger`], which runs the exchanges of a rank.

use std::ops::Range;

use super::kind::{Exchange, ExchangeKind, MessageLengths};
use crate::Result;
use crate::comm::{Communicator, Front, Operation, Pending};
use crate::device::{BlockShape, Device, Role};
use crate::parallel::batch::Summation;
use crate::parallel::tensor::division::FeatureDivision;

/// The exchanges of this rank, with the memory for their messages.
pub struct Exchanger<'a, D: Device> {
    /// The device that computes.
    pub device: &'a D,
    /// The communicator of the tensor axis; `None` where layers are whole.
    tensor: Option<Communicator>,
    division: FeatureDivision,
    scratch: Option<D::Buffer>,
    /// The sums over positions of the gradients of a layer's parameters, for each row.
    position_sums: Option<D::Buffer>,
    /// The statistics of the logits of all ranks.
    pub(in crate::parallel::tensor) statistics: Option<D::Buffer>,
    /// The sums of exponentials of logits.
    pub(in crate::parallel::tensor) exponentials: Option<D::Buffer>,
}

/// An exchange of gradients under way.
pub enum Started<B> {
    /// Nothing had to be sent.
    Nothing,
    /// A sum in place.
    Sum(Pending<Front<B>>),
    /// A sum of which this rank gets its columns.
    Scatter(Pending<Front<B>>),
    /// The columns of all ranks.
    Gather(Pending<Front<B>>),
}

impl<'a, D: Device> Exchanger<'a, D> {
    /// Prepares for whole layers, between which nothing is exchanged. Not collective.
    pub fn alone(device: &'a D) -> Exchanger<'a, D> {
        let division = FeatureDivision::new(Summation::ByLayout, 1);
        Exchanger {
            device,
            tensor: None,
            division,
            scratch: None,
            position_sums: None,
            statistics: None,
            exponentials: None,
        }
    }

    /// Prepares for exchanges over `tensor`, among whose ranks `division` divides features, with messages
    /// of at most `lengths`. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn new(
        device: &'a D,
        tensor: &Communicator,
        division: FeatureDivision,
        lengths: MessageLengths,
    ) -> Result<Exchanger<'a, D>> {
        let MessageLengths { gathered, position_sums, statistics, exponentials, .. } = lengths;
        Ok(Exchanger {
            device,
            tensor: Some(tensor.clone()),
            division,
            scratch: Some(device.allocate(gathered, Role::Activations)?),
            position_sums: Some(device.allocate(position_sums, Role::Exact)?),
            statistics: Some(device.allocate(statistics, Role::Exact)?),
            exponentials: Some(device.allocate(exponentials, Role::Exact)?),
        })
    }

    /// Returns true if layers are whole, so that nothing is exchanged.
    pub fn is_alone(&self) -> bool {
        self.tensor.is_none()
    }

    pub(in crate::parallel::tensor) fn rank(&self) -> usize {
        self.tensor.as_ref().map_or(0, Communicator::rank)
    }

    pub(in crate::parallel::tensor) fn size(&self) -> usize {
        self.tensor.as_ref().map_or(1, Communicator::size)
    }

    /// Returns the ranks that exchange, with the order of their sums.
    pub(in crate::parallel::tensor) fn peers(&self, exchange: Exchange) -> Communicator {
        let tensor = self.tensor.as_ref().expect("only divided layers have exchanges");
        let subtrees = self.division.canonical_subtrees(exchange.num_leaves);
        subtrees.map_or_else(|| tensor.clone(), |subtrees| tensor.with_subtrees(subtrees))
    }

    /// Exchanges the values of some rows, from those `before` the exchange to those `after` it, which is
    /// not used where the exchange is in place; that has all rows. Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn forward(
        &mut self,
        exchange: Exchange,
        rows: Range<usize>,
        before: &mut Option<D::Buffer>,
        after: &mut Option<D::Buffer>,
    ) -> Result<()> {
        match exchange.kind {
            ExchangeKind::SumGradient => {}
            ExchangeKind::SumValues => {
                let started = self.start_sum(before, exchange, rows.len())?;
                self.finish(started, exchange, rows, before);
            }
            ExchangeKind::Gather | ExchangeKind::GatherOutput => {
                let started = self.start_gather(exchange, rows.clone(), here(before))?;
                self.finish(started, exchange, rows, after);
            }
            ExchangeKind::Scatter => {
                let started = self.start_scatter(exchange, rows.clone(), here(before))?;
                self.finish(started, exchange, rows, after);
            }
            ExchangeKind::TakeOwn => self.own_columns(exchange, rows, here(before), here_mut(after)),
        }
        Ok(())
    }

    /// Starts the exchange of the gradients of some rows, from the gradient of the values `after` the
    /// exchange. Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn start_backward(
        &mut self,
        exchange: Exchange,
        rows: Range<usize>,
        after: &mut Option<D::Buffer>,
    ) -> Result<Started<D::Buffer>> {
        match exchange.kind {
            ExchangeKind::SumGradient => self.start_sum(after, exchange, rows.len()),
            ExchangeKind::SumValues | ExchangeKind::GatherOutput => Ok(Started::Nothing),
            ExchangeKind::Gather => self.start_scatter(exchange, rows, here(after)),
            ExchangeKind::Scatter | ExchangeKind::TakeOwn => self.start_gather(exchange, rows, here(after)),
        }
    }

    /// Finishes an exchange that has been started and puts the values or the gradients `into` their array,
    /// which is where they were taken from if the exchange is in place. Collective over the tensor axis.
    pub fn finish(
        &mut self,
        started: Started<D::Buffer>,
        exchange: Exchange,
        rows: Range<usize>,
        into: &mut Option<D::Buffer>,
    ) {
        let (width, vectors) = (exchange.width, rows.len() * exchange.positions);
        let part = vectors * exchange.columns.most();
        match started {
            Started::Nothing => {}
            Started::Sum(sum) => *into = Some(sum.wait().buffer),
            Started::Scatter(columns) => {
                let parts = columns.wait().buffer;
                let own = rows.start * exchange.positions * exchange.own_width;
                let (from, len) = (self.rank() * part, vectors * exchange.own_width);
                let from = self.device.view(&parts, from..from + len);
                self.device.copy(from, self.device.view_mut(here_mut(into), own..own + len));
                self.scratch = Some(parts);
            }
            Started::Gather(columns) => {
                let (parts, start) = (columns.wait().buffer, rows.start * exchange.row_len());
                for rank in 0..self.size() {
                    let columns = exchange.columns.of_rank(rank);
                    let shape = BlockShape {
                        rows: vectors,
                        columns: columns.len(),
                        from_stride: columns.len(),
                        into_stride: width,
                    };
                    let from = self.device.view(&parts, rank * part..(rank + 1) * part);
                    let place = start + columns.start..start + vectors * width;
                    self.device.copy_block(&shape, from, self.device.view_mut(here_mut(into), place));
                }
                self.scratch = Some(parts);
            }
        }
    }

    /// Copies this rank's columns of some rows of `all` into `own`. Not collective.
    pub fn own_columns(&self, exchange: Exchange, rows: Range<usize>, all: &D::Buffer, own: &mut D::Buffer) {
        let (width, vectors) = (exchange.width, rows.len() * exchange.positions);
        let columns = exchange.columns.of_rank(self.rank());
        let (start, own_start) =
            (rows.start * exchange.row_len(), rows.start * exchange.positions * columns.len());
        let shape = BlockShape {
            rows: vectors,
            columns: columns.len(),
            from_stride: width,
            into_stride: columns.len(),
        };
        let from = self.device.view(all, start + columns.start..start + vectors * width);
        let own = self.device.view_mut(own, own_start..own_start + vectors * columns.len());
        self.device.copy_block(&shape, from, own);
    }

    /// Starts the sum over the ranks of what the positions of `rows` rows add to gradients of parameters;
    /// `fill` writes this rank's sums. Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn start_position_sums(
        &mut self,
        exchange: Exchange,
        rows: usize,
        fill: impl FnOnce(D::ViewMut<'_>),
    ) -> Result<Started<D::Buffer>> {
        let mut sums = self.position_sums.take();
        let own = exchange.num_own_sums * rows * exchange.row_len();
        if own > 0 {
            fill(self.device.view_mut(here_mut(&mut sums), 0..own));
        }
        self.start_sum(&mut sums, exchange, rows)
    }

    /// Returns the array of sums over positions.
    pub fn position_sums(&mut self) -> &mut D::Buffer {
        here_mut(&mut self.position_sums)
    }

    /// Finishes a sum that [`Exchanger::start_position_sums`] started, and returns its array,
    /// `[rows, row_len]`. Collective over the tensor axis.
    pub fn finish_position_sums(&mut self, started: Started<D::Buffer>) -> &mut D::Buffer {
        if let Started::Sum(sum) = started {
            self.position_sums = Some(sum.wait().buffer);
        }
        self.position_sums()
    }

    fn start_sum(
        &mut self,
        terms: &mut Option<D::Buffer>,
        exchange: Exchange,
        rows: usize,
    ) -> Result<Started<D::Buffer>> {
        let buffer = terms.take().expect("values that are summed are here");
        let len = exchange.sums_len(rows);
        Ok(Started::Sum(
            self.peers(exchange).start_all_reduce_in_place(Front { buffer, len }, Operation::Sum)?,
        ))
    }

    /// Starts gathering the columns of all ranks, from this rank's in `own`.
    fn start_gather(
        &mut self,
        exchange: Exchange,
        rows: Range<usize>,
        own: &D::Buffer,
    ) -> Result<Started<D::Buffer>> {
        let (device, vectors) = (self.device, rows.len() * exchange.positions);
        let mut parts = self.scratch.take().expect("one exchange at a time");
        let (part, len) = (vectors * exchange.columns.most(), vectors * exchange.own_width);
        let (start, place) = (rows.start * exchange.positions * exchange.own_width, self.rank() * part);
        device.copy(device.view(own, start..start + len), device.view_mut(&mut parts, place..place + len));
        let parts = Front { buffer: parts, len: self.size() * part };
        Ok(Started::Gather(self.peers(exchange).start_all_gather_in_place(parts)?))
    }

    /// Starts adding up the arrays of `all` over the ranks, of which each gets its own columns.
    fn start_scatter(
        &mut self,
        exchange: Exchange,
        rows: Range<usize>,
        all: &D::Buffer,
    ) -> Result<Started<D::Buffer>> {
        assert_eq!(rows.start, 0, "the arrays of a sum begin with the first row");
        let (width, vectors) = (exchange.width, rows.len() * exchange.positions);
        let mut parts = self.scratch.take().expect("one exchange at a time");
        let (part, size) = (vectors * exchange.columns.most(), self.size());
        for (sum, rank) in (0..exchange.num_sums).flat_map(|sum| (0..size).map(move |r| (sum, r))) {
            let columns = exchange.columns.of_rank(rank);
            let shape = BlockShape {
                rows: vectors,
                columns: columns.len(),
                from_stride: width,
                into_stride: columns.len(),
            };
            let (first, slot) = (sum * vectors * width, sum * size + rank);
            let block = self.device.view(all, first + columns.start..first + vectors * width);
            let into = self.device.view_mut(&mut parts, slot * part..(slot + 1) * part);
            self.device.copy_block(&shape, block, into);
        }
        let parts = Front { buffer: parts, len: exchange.num_sums * size * part };
        Ok(Started::Scatter(self.peers(exchange).start_reduce_scatter(parts, Operation::Sum)?))
    }
}

/// Returns an array, which must not be in a message.
pub fn here<B>(buffer: &Option<B>) -> &B {
    buffer.as_ref().expect("an array is read only while it is here")
}

/// Returns an array, which must not be in a message, to write.
pub fn here_mut<B>(buffer: &mut Option<B>) -> &mut B {
    buffer.as_mut().expect("an array is written only while it is here")
}
