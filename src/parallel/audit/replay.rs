//! [`Replay`], the passes of a leaf of another rank.

use std::ops::Range;

use crate::Result;
use crate::comm::{Communicator, Front};
use crate::device::{Device, Role, totals};
use crate::nn::{Draws, FlatBuffer, Segmentation};
use crate::parallel::data::Weights;
use crate::parallel::layout::Layout;
use crate::parallel::pipeline::{MicroBatchSource, load};
use crate::parallel::stage::{Activations, BackwardContext, Gradients, Pass, Stage, WeightRows};
use crate::parallel::tensor::exchange::{Exchanger, here, here_mut};
use crate::parallel::watch::{BitFold, FoldRecord, Site, fold_rows};
use crate::parallel::zero::Direction;
use crate::sums::Section;

/// The parameters of the part that a rank plays.
pub enum PartParameters<'w, D: Device> {
    /// The parameters of this rank: it is a replica, or plays its own part.
    Own(&'w mut Weights<D>),
    /// A copy.
    Copy(&'w FlatBuffer<D>),
}

impl<D: Device> PartParameters<'_, D> {
    fn prepare(
        &mut self,
        device: &D,
        tensors: &Range<usize>,
        stage: &Range<usize>,
        direction: Direction,
    ) -> Result<()> {
        match self {
            PartParameters::Own(weights) => weights.prepare(device, tensors, stage, direction),
            PartParameters::Copy(_) => Ok(()),
        }
    }

    fn flat(&self) -> &FlatBuffer<D> {
        match self {
            PartParameters::Own(weights) => weights.parameters(),
            PartParameters::Copy(flat) => flat,
        }
    }
}

/// The batch of an audited step.
#[derive(Debug, Clone, Copy)]
pub struct AuditedBatch {
    /// The number of rows.
    pub len: usize,
    /// The factor of the loss's gradient.
    pub scale: f32,
    /// The draws of the step, from row 0 on.
    pub draws: Draws,
}

/// A function that writes the inputs and the targets of rows of the batch; either may be left out.
pub type LoadRows<'l, D> = dyn FnMut(
        &D,
        Range<usize>,
        <D as crate::device::MemoryOperations>::ViewMut<'_>,
        <D as crate::device::MemoryOperations>::ViewMut<'_>,
    ) -> Result<()>
    + 'l;

/// The rows of a leaf in parts, as micro-batches.
struct LeafSource<'l, 's, D: Device> {
    sections: &'s [Section],
    draws: Draws,
    load: &'s mut LoadRows<'l, D>,
}

impl<D: Device> MicroBatchSource<D> for LeafSource<'_, '_, D> {
    fn section(&self, part: usize) -> Section {
        self.sections[part]
    }

    fn draws(&self, part: usize) -> Option<Draws> {
        Some(Draws { first_row: self.sections[part].terms().start, ..self.draws })
    }

    fn load(
        &mut self,
        device: &D,
        part: usize,
        inputs: D::ViewMut<'_>,
        targets: D::ViewMut<'_>,
    ) -> Result<()> {
        (self.load)(device, self.sections[part].terms(), inputs, targets)
    }
}

/// A stage of the part, with arrays for each part of the leaf.
struct ReplayedStage<D: Device> {
    stage: Stage,
    parts: Vec<(Activations<D>, Gradients<D>)>,
}

/// The passes through the stages of the part that this rank plays. All ranks of a replica run them at
/// once, and exchange what they exchange in a step.
pub struct Replay<'a, D: Device> {
    exchanger: Exchanger<'a, D>,
    channel: Communicator,
    /// For each stage, the rank of `channel` that plays it.
    players: Vec<usize>,
    stages: Vec<ReplayedStage<D>>,
    /// The number in the model of each tensor.
    tensors: Vec<usize>,
    /// The sums of the gradients of weights, of which one segment at a time has memory.
    sums: FlatBuffer<D>,
    memory: Option<D::Buffer>,
    totals: D::Buffer,
}

impl<'a, D: Device> Replay<'a, D> {
    /// Allocates the arrays for the stages of `layout`, whose tensors lie in the segments of
    /// `segmentation`, for `num_parts` parts of a leaf of at most `rows` rows each. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory.
    pub fn new(
        exchanger: Exchanger<'a, D>,
        channel: Communicator,
        players: Vec<usize>,
        layout: &Layout,
        segmentation: &Segmentation,
        num_parts: usize,
        rows: usize,
    ) -> Result<Replay<'a, D>> {
        let device = exchanger.device;
        let arrays = |stage: &Stage| {
            let part = |_| {
                let activations = stage.allocate_activations(device, rows, None)?;
                Ok((activations, stage.allocate_gradients(device, rows)?))
            };
            let parts = (0..num_parts).map(part).collect::<Result<_>>()?;
            Ok(ReplayedStage { stage: stage.clone(), parts })
        };
        let stages = layout.stages.iter().map(arrays).collect::<Result<_>>()?;
        let sums = FlatBuffer::without_memory(&layout.shards(), segmentation);
        let memory = Some(device.allocate(sums.longest_memory(), Role::Exact)?);
        let tensors = layout.tensors.iter().map(|(number, _)| *number).collect();
        let totals = device.allocate(totals::LEN, Role::Exact)?;
        Ok(Replay { exchanger, channel, players, stages, tensors, sums, memory, totals })
    }

    /// Runs the forward and the backward pass of a leaf whose parts are the `sections` of the batch,
    /// and returns the folds of its arrays. Collective over
    /// the ranks of a replica, and if parameters are gathered over all replicas.
    ///
    /// # Errors
    /// A sample cannot be read, or there is no memory for messages.
    pub fn run(
        &mut self,
        mut parameters: PartParameters<'_, D>,
        sections: &[Section],
        load: &mut LoadRows<'_, D>,
        AuditedBatch { scale, draws, .. }: AuditedBatch,
    ) -> Result<FoldRecord> {
        let (mut record, device) = (FoldRecord::default(), self.exchanger.device);
        // nobody reads these
        device.fill(device.view_mut(&mut self.totals, 0..totals::LEN), 0.0);
        let mut source = LeafSource { sections, draws, load };
        for local in 0..self.stages.len() {
            self.forward(local, &mut parameters, &mut source, &mut record)?;
        }
        for local in (0..self.stages.len()).rev() {
            self.backward(local, &mut parameters, sections, scale, &mut record)?;
        }
        for local in (0..self.stages.len()).rev() {
            self.weight_gradients(local, sections, &mut record)?;
        }
        Ok(record)
    }

    fn forward(
        &mut self,
        local: usize,
        parameters: &mut PartParameters<'_, D>,
        source: &mut LeafSource<'_, '_, D>,
        record: &mut FoldRecord,
    ) -> Result<()> {
        let (device, num_parts) = (self.exchanger.device, source.sections.len());
        let index = self.stages[local].stage.index;
        for part in 0..num_parts {
            let rows = source.rows(part);
            let ReplayedStage { stage, parts } = &mut self.stages[local];
            load(device, stage, part, rows, &mut parts[part].0, source)?;
            self.receive(local, part, rows, false)?;
            self.record_value(local, 0, part, rows, record)?;
        }
        for at in 0..self.stages[local].stage.num_pieces() {
            let ReplayedStage { stage, parts } = &mut self.stages[local];
            parameters.prepare(device, &stage.tensors_of(at), &stage.tensors, Direction::Forward)?;
            for (part, (activations, _)) in parts.iter_mut().enumerate().take(num_parts) {
                let rows = source.rows(part);
                stage.forward_piece(&mut self.exchanger, parameters.flat(), at, rows, activations)?;
            }
            for part in 0..num_parts {
                self.record_value(local, at + 1, part, source.rows(part), record)?;
            }
        }
        let (has_next, width) = (index + 1 < self.players.len(), self.stages[local].stage.output_width());
        (0..num_parts)
            .filter(|_| has_next)
            .try_for_each(|part| self.send(local, part, source.rows(part) * width, false))
    }

    fn backward(
        &mut self,
        local: usize,
        parameters: &mut PartParameters<'_, D>,
        sections: &[Section],
        scale: f32,
        record: &mut FoldRecord,
    ) -> Result<()> {
        let (device, num_pieces) = (self.exchanger.device, self.stages[local].stage.num_pieces());
        for (part, section) in sections.iter().enumerate() {
            let rows = section.len();
            let ReplayedStage { stage, parts } = &mut self.stages[local];
            let (activations, gradients) = &mut parts[part];
            if stage.head.is_none() {
                self.receive(local, part, rows, true)?;
            } else if rows > 0 {
                stage.loss(&mut self.exchanger, rows, scale, activations, gradients, &mut self.totals)?;
            }
            self.record_gradient(local, num_pieces, part, rows, record)?;
        }
        for at in (0..num_pieces).rev() {
            let Replay { exchanger, stages, sums, .. } = &mut *self;
            let ReplayedStage { stage, parts } = &mut stages[local];
            parameters.prepare(device, &stage.tensors_of(at), &stage.tensors, Direction::Backward)?;
            for ((activations, gradients), section) in parts.iter_mut().zip(sections) {
                let mut context = BackwardContext {
                    exchanger,
                    parameters: parameters.flat(),
                    gradients: sums,
                    section: *section,
                };
                stage.backward_piece(&mut context, at, Pass::Inputs, activations, gradients)?;
            }
            let is_needed = self.stages[local].stage.needs_gradient(at);
            for (part, section) in sections.iter().enumerate().filter(|_| is_needed) {
                self.record_gradient(local, at, part, section.len(), record)?;
            }
        }
        let index = self.stages[local].stage.index;
        sections.iter().enumerate().filter(|_| index > 0).try_for_each(|(part, section)| {
            let width = self.stages[local].stage.input_gradient_width();
            self.send(local, part, section.len() * width, true)
        })
    }

    fn weight_gradients(
        &mut self,
        local: usize,
        sections: &[Section],
        record: &mut FoldRecord,
    ) -> Result<()> {
        let Replay { exchanger, stages, tensors, sums, memory, .. } = self;
        let (device, ReplayedStage { stage, parts }) = (exchanger.device, &mut stages[local]);
        let is_complete = sections.last().is_some_and(|last| last.is_complete());
        for at in (0..stage.num_pieces()).rev().filter(|_| is_complete) {
            let own = stage.tensors_of(at);
            if own.is_empty() {
                continue;
            }
            let (segment, _) = sums.place(own.start);
            sums.put(segment, memory.take().expect("one segment at a time has the memory"));
            let rows = parts.iter_mut().zip(sections).map(|((activations, gradients), section)| WeightRows {
                activations,
                gradients,
                first_row: 0,
                section: *section,
            });
            let mut rows: Vec<WeightRows<'_, D>> = rows.collect();
            stage.weights_piece(exchanger, sums, at, &mut rows)?;
            for tensor in own {
                let site = Site::WeightGradient { stage: stage.index, tensor: tensors[tensor] };
                device.read(sums.tensor(device, tensor), &mut |values| {
                    record.add(site, BitFold::of(values));
                    Ok(())
                })?;
            }
            *memory = Some(sums.take(segment));
        }
        Ok(())
    }

    /// Receives the input of a stage, or the gradient of its output, from the rank that plays the stage
    /// before or after it.
    fn receive(&mut self, local: usize, part: usize, rows: usize, is_gradient: bool) -> Result<()> {
        let device = self.exchanger.device;
        let ReplayedStage { stage, parts } = &mut self.stages[local];
        let (index, width) = if is_gradient {
            (stage.index + 1, stage.output_gradient_width())
        } else {
            (stage.index, stage.input_width())
        };
        if index == 0 || rows * width == 0 {
            return Ok(());
        }
        let from = if is_gradient { index } else { index - 1 };
        let place = |(activations, gradients): &mut (Activations<D>, Gradients<D>)| {
            if is_gradient { gradients.output().take() } else { activations.input().take() }
        };
        let mut buffer = place(&mut parts[part]);
        if self.players[from] == self.channel.rank() {
            let other = self.stages.iter_mut().find(|other| other.stage.index == from);
            let other = other.expect("a rank has the stages that it plays");
            let (activations, gradients) = &mut other.parts[part];
            let sent = if is_gradient { gradients.input() } else { activations.output() };
            let len = rows * width;
            device.copy(device.view(here(sent), 0..len), device.view_mut(here_mut(&mut buffer), 0..len));
        } else {
            let front =
                Front { buffer: buffer.take().expect("arrays are here between messages"), len: rows * width };
            let (peer, tag) = (self.players[from], tag(part, is_gradient));
            buffer = Some(self.channel.start_receive(front, peer, tag)?.wait().buffer);
        }
        let (activations, gradients) = &mut self.stages[local].parts[part];
        *(if is_gradient { gradients.output() } else { activations.input() }) = buffer;
        Ok(())
    }

    /// Sends the output of a stage, or the gradient of its input, of `len` values, unless this rank
    /// plays the next stage too.
    fn send(&mut self, local: usize, part: usize, len: usize, is_gradient: bool) -> Result<()> {
        let ReplayedStage { stage, parts } = &mut self.stages[local];
        let to = if is_gradient { stage.index - 1 } else { stage.index + 1 };
        let peer = self.players[to];
        if len == 0 || peer == self.channel.rank() {
            return Ok(());
        }
        let (activations, gradients) = &mut parts[part];
        let place = if is_gradient { gradients.input() } else { activations.output() };
        let buffer = place.take().expect("arrays are here between messages");
        let front = Front { buffer, len };
        *place = Some(self.channel.start_send(front, peer, tag(part, is_gradient))?.wait().buffer);
        Ok(())
    }

    fn record_value(
        &mut self,
        local: usize,
        point: usize,
        part: usize,
        rows: usize,
        record: &mut FoldRecord,
    ) -> Result<()> {
        let ReplayedStage { stage, parts } = &mut self.stages[local];
        let site = Site::Value { stage: stage.index, point, part };
        let array = stage.values_at(point, &mut parts[part].0);
        if rows > 0 {
            record.add(site, fold_rows(self.exchanger.device, &array, rows, rows)?);
        }
        Ok(())
    }

    fn record_gradient(
        &mut self,
        local: usize,
        point: usize,
        part: usize,
        rows: usize,
        record: &mut FoldRecord,
    ) -> Result<()> {
        let ReplayedStage { stage, parts } = &mut self.stages[local];
        let site = Site::Gradient { stage: stage.index, point, part };
        let array = stage.gradients_at(point, &mut parts[part].1);
        if rows > 0 {
            record.add(site, fold_rows(self.exchanger.device, &array, rows, rows)?);
        }
        Ok(())
    }
}

/// Returns the tag of a message about a part of the leaf.
fn tag(part: usize, is_gradient: bool) -> i32 {
    (2 * part + usize::from(is_gradient)) as i32
}
