//! The exchanges of the ranks of the tensor axis between divided layers.
//!
//! Each exchange is a pair of conjugate operations, one for the values of the forward pass, one for
//! the gradients of the backward pass: Shoeybi et al., "Megatron-LM", 2019, §3, where the first two
//! are called f and g.
//!
//! The loss has exchanges of its own: [`cross_entropy`](super::cross_entropy).
//!
//! Sums are formed in place, in the order of [`crate::sums`], so every rank gets the bits of a whole
//! layer. Their first round is under way while the gradients of the weights are computed.

use super::division::FeatureDivision;
use crate::Result;
use crate::comm::{Communicator, Front, Operation, Pending};
use crate::device::{BlockShape, Device, Role};
use crate::parallel::batch::Summation;

/// The kind of an exchange between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExchangeKind {
    /// f: every rank has the values and uses them; the gradient is summed over the ranks.
    SumGradient,
    /// g: the values are summed over the ranks; every rank gets the gradient of the sum.
    SumValues,
    /// Every rank has some of the columns and gathers all; the gradient is summed over the ranks,
    /// of which each gets its own columns.
    Gather,
    /// Every rank has some of the columns and gathers all; every rank has the gradient of all
    /// columns already, as computed from the loss.
    GatherOutput,
}

/// An exchange between two layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The kind of the exchange.
    pub kind: ExchangeKind,
    /// The number of vectors of a row, such as the positions of a sequence.
    pub positions: usize,
    /// The number of columns of a vector, of all ranks together.
    pub width: usize,
    /// The number of leaves of the sums.
    pub num_leaves: usize,
    /// The number of arrays in which a rank forms its part of the sum: the most of all ranks.
    pub num_sums: usize,
    /// The number of these that this rank fills.
    pub num_own_sums: usize,
}

impl Exchange {
    /// Returns the number of values of a row, of all ranks together.
    pub fn row_len(self) -> usize {
        self.positions * self.width
    }

    /// Returns the number of arrays of values before the exchange.
    pub fn num_value_sums(self) -> usize {
        if self.kind == ExchangeKind::SumValues { self.num_sums } else { 1 }
    }

    /// Returns the number of arrays of gradients after the exchange.
    pub fn num_gradient_sums(self) -> usize {
        match self.kind {
            ExchangeKind::SumGradient | ExchangeKind::Gather => self.num_sums,
            ExchangeKind::SumValues | ExchangeKind::GatherOutput => 1,
        }
    }

    /// Returns the lengths of the messages of `rows` rows, with the division of features among the ranks.
    pub fn message_lengths(self, rows: usize, features: FeatureDivision) -> MessageLengths {
        let vectors = rows.saturating_mul(self.positions);
        let none = MessageLengths::default();
        if self.is_in_place() {
            let sums = vectors.saturating_mul(self.width).saturating_mul(self.num_sums);
            return MessageLengths { in_place: sums, ..none };
        }
        MessageLengths { gathered: features.message_len(vectors, self.width, self.num_sums), ..none }
    }

    /// Returns true if the exchange works in place.
    pub fn is_in_place(self) -> bool {
        matches!(self.kind, ExchangeKind::SumGradient | ExchangeKind::SumValues)
    }
}

/// The exchanges of this rank, with the memory for their messages.
pub struct Exchanger<'a, D: Device> {
    /// The device that computes.
    pub device: &'a D,
    /// The communicator of the tensor axis; `None` where layers are whole.
    tensor: Option<Communicator>,
    division: FeatureDivision,
    scratch: Option<D::Buffer>,
    /// The statistics of the logits of all ranks.
    pub(super) statistics: Option<D::Buffer>,
    /// The sums of exponentials of logits.
    pub(super) exponentials: Option<D::Buffer>,
}

/// The most values in a message of each kind of exchange of a rank.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct MessageLengths {
    /// Between layers, in the arrays of the layers.
    pub in_place: usize,
    /// Between layers, in memory for messages.
    pub gathered: usize,
    /// Of statistics of logits.
    pub statistics: usize,
    /// Of the sums of exponentials of logits.
    pub exponentials: usize,
}

impl MessageLengths {
    /// Returns the longer of the messages of each kind.
    pub fn max(self, other: MessageLengths) -> MessageLengths {
        MessageLengths {
            in_place: self.in_place.max(other.in_place),
            gathered: self.gathered.max(other.gathered),
            statistics: self.statistics.max(other.statistics),
            exponentials: self.exponentials.max(other.exponentials),
        }
    }

    /// Returns the number of values in the memory for messages.
    pub fn allocated(self) -> usize {
        [self.gathered, self.statistics, self.exponentials].into_iter().fold(0, usize::saturating_add)
    }

    /// Returns the most values that are on their way to a rank at a time.
    pub fn longest(self) -> usize {
        self.in_place.max(self.gathered).max(self.statistics).max(self.exponentials)
    }
}

/// An exchange of gradients under way.
pub enum Started<B> {
    /// Nothing had to be sent.
    Nothing,
    /// A sum in place.
    Sum(Pending<Front<B>>),
    /// A sum of which this rank gets its columns.
    Columns(Pending<Front<B>>),
}

impl<'a, D: Device> Exchanger<'a, D> {
    /// Prepares for whole layers, between which nothing is exchanged. Not collective.
    pub fn alone(device: &'a D) -> Exchanger<'a, D> {
        let division = FeatureDivision::new(Summation::ByLayout, 1);
        Exchanger { device, tensor: None, division, scratch: None, statistics: None, exponentials: None }
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
        let MessageLengths { gathered, statistics, exponentials, .. } = lengths;
        Ok(Exchanger {
            device,
            tensor: Some(tensor.clone()),
            division,
            scratch: Some(device.allocate(gathered, Role::Activations)?),
            statistics: Some(device.allocate(statistics, Role::Exact)?),
            exponentials: Some(device.allocate(exponentials, Role::Exact)?),
        })
    }

    /// Returns true if layers are whole, so that nothing is exchanged.
    pub fn is_alone(&self) -> bool {
        self.tensor.is_none()
    }

    pub(super) fn rank(&self) -> usize {
        self.tensor.as_ref().map_or(0, Communicator::rank)
    }

    pub(super) fn size(&self) -> usize {
        self.tensor.as_ref().map_or(1, Communicator::size)
    }

    /// Returns the ranks that exchange, with the order of their sums.
    pub(super) fn peers(&self, exchange: Exchange) -> Communicator {
        let tensor = self.tensor.as_ref().expect("only divided layers have exchanges");
        let subtrees = self.division.canonical_subtrees(exchange.num_leaves);
        subtrees.map_or_else(|| tensor.clone(), |subtrees| tensor.with_subtrees(subtrees))
    }

    /// Exchanges values, from `own` to `all`; `all` is not used where the exchange is in place.
    /// Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn forward(
        &mut self,
        exchange: Exchange,
        rows: usize,
        own: &mut Option<D::Buffer>,
        all: &mut Option<D::Buffer>,
    ) -> Result<()> {
        match exchange.kind {
            ExchangeKind::SumGradient => Ok(()),
            ExchangeKind::SumValues => {
                let started = self.start_sum(own, exchange, rows)?;
                self.finish(started, exchange, rows, own);
                Ok(())
            }
            ExchangeKind::Gather | ExchangeKind::GatherOutput => self.gather(exchange, rows, own, all),
        }
    }

    /// Starts the exchange of gradients, from the gradient of `all` to the gradient of `own`.
    /// Collective over the tensor axis.
    ///
    /// # Errors
    /// There is no memory for messages.
    pub fn start_backward(
        &mut self,
        exchange: Exchange,
        rows: usize,
        all: &mut Option<D::Buffer>,
    ) -> Result<Started<D::Buffer>> {
        let (width, vectors) = (exchange.width, rows * exchange.positions);
        match exchange.kind {
            ExchangeKind::SumGradient => self.start_sum(all, exchange, rows),
            ExchangeKind::SumValues | ExchangeKind::GatherOutput => Ok(Started::Nothing),
            ExchangeKind::Gather => {
                let from = here(all);
                let mut parts = self.scratch.take().expect("one exchange at a time");
                let (part, size) = (self.part_len(width, vectors), self.size());
                for (sum, rank) in (0..exchange.num_sums).flat_map(|sum| (0..size).map(move |r| (sum, r))) {
                    let columns = self.division.columns(width, rank);
                    let shape = BlockShape {
                        rows: vectors,
                        columns: columns.len(),
                        from_stride: width,
                        into_stride: columns.len(),
                    };
                    let (first, slot) = (sum * vectors * width, sum * size + rank);
                    let block = self.device.view(from, first + columns.start..first + vectors * width);
                    let into = self.device.view_mut(&mut parts, slot * part..(slot + 1) * part);
                    self.device.copy_block(&shape, block, into);
                }
                let parts = Front { buffer: parts, len: exchange.num_sums * size * part };
                Ok(Started::Columns(self.peers(exchange).start_reduce_scatter(parts, Operation::Sum)?))
            }
        }
    }

    /// Finishes an exchange that [`Exchanger::start_backward`] started and puts the gradient into
    /// `own`, which is where `all` was taken from if the exchange is in place. Collective over the
    /// tensor axis.
    pub fn finish(
        &mut self,
        started: Started<D::Buffer>,
        exchange: Exchange,
        rows: usize,
        own: &mut Option<D::Buffer>,
    ) {
        match started {
            Started::Nothing => {}
            Started::Sum(sum) => *own = Some(sum.wait().buffer),
            Started::Columns(columns) => {
                let parts = columns.wait().buffer;
                let vectors = rows * exchange.positions;
                let part = self.part_len(exchange.width, vectors);
                let rank = self.rank();
                let len = vectors * self.division.columns(exchange.width, rank).len();
                let from = self.device.view(&parts, rank * part..rank * part + len);
                self.device.copy(from, self.device.view_mut(here_mut(own), 0..len));
                self.scratch = Some(parts);
            }
        }
    }

    /// Copies this rank's columns of `all`, the output of `exchange`, into `own`. Not collective.
    pub fn own_columns(&self, exchange: Exchange, rows: usize, all: &D::Buffer, own: &mut D::Buffer) {
        let (width, rows) = (exchange.width, rows * exchange.positions);
        let columns = self.division.columns(width, self.rank());
        let shape =
            BlockShape { rows, columns: columns.len(), from_stride: width, into_stride: columns.len() };
        let from = self.device.view(all, columns.start..rows * width);
        self.device.copy_block(&shape, from, self.device.view_mut(own, 0..rows * columns.len()));
    }

    fn start_sum(
        &mut self,
        terms: &mut Option<D::Buffer>,
        exchange: Exchange,
        rows: usize,
    ) -> Result<Started<D::Buffer>> {
        let buffer = terms.take().expect("values that are summed are here");
        let len = exchange.num_sums * rows * exchange.row_len();
        Ok(Started::Sum(
            self.peers(exchange).start_all_reduce_in_place(Front { buffer, len }, Operation::Sum)?,
        ))
    }

    fn gather(
        &mut self,
        exchange: Exchange,
        rows: usize,
        own: &Option<D::Buffer>,
        all: &mut Option<D::Buffer>,
    ) -> Result<()> {
        let (width, rows) = (exchange.width, rows * exchange.positions);
        let (device, size, part) = (self.device, self.size(), self.part_len(width, rows));
        let mut parts = self.scratch.take().expect("one exchange at a time");
        let len = rows * self.division.columns(width, self.rank()).len();
        let start = self.rank() * part;
        device.copy(device.view(here(own), 0..len), device.view_mut(&mut parts, start..start + len));
        let parts = self
            .peers(exchange)
            .start_all_gather_in_place(Front { buffer: parts, len: size * part })?
            .wait()
            .buffer;
        for rank in 0..size {
            let columns = self.division.columns(width, rank);
            let shape =
                BlockShape { rows, columns: columns.len(), from_stride: columns.len(), into_stride: width };
            let from = device.view(&parts, rank * part..(rank + 1) * part);
            device.copy_block(&shape, from, device.view_mut(here_mut(all), columns.start..rows * width));
        }
        self.scratch = Some(parts);
        Ok(())
    }

    /// Returns the length of every rank's part of a message, which is that of the widest part.
    fn part_len(&self, width: usize, rows: usize) -> usize {
        rows * self.division.most_columns(width)
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
