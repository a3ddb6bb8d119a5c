//! The samples of a step: [`Rows`] reads and uploads them micro-batch by micro-batch, or gathers
//! them from a [`Resident`] set that is kept on the device.

use std::ops::Range;

use crate::Result;
use crate::dataset::Batches;
use crate::device::{Device, GatheredRows, Role};
use crate::nn::Draws;
use crate::parallel::batch::BatchDivision;
use crate::parallel::pipeline::MicroBatchSource;
use crate::sums::Section;
use crate::trace::{self, Name};

/// The number of values that are read at a time to be kept on the device.
const CHUNK: usize = 1 << 20;

/// The most samples that 32 bits can number.
const MOST_SAMPLES: usize = u32::MAX as usize;

/// A set of samples that is kept on the device, standardised.
pub(super) struct Resident<D: Device> {
    inputs: D::Buffer,
    targets: D::Buffer,
    /// The numbers of a micro-batch's samples, each in the bits of an `f32`.
    numbers: D::Buffer,
    /// The number of input values of a sample.
    input_len: usize,
    target_len: usize,
    num_samples: usize,
}

impl<D: Device> Resident<D> {
    /// Uploads the inputs and the targets of all samples of `batches`, as far as this rank needs
    /// them, if the device has room for them; `rows` is the size of the largest micro-batch. Not
    /// collective.
    ///
    /// # Errors
    /// A sample cannot be read.
    pub(super) fn new(
        device: &D,
        batches: &mut Batches,
        rows: usize,
        needs_inputs: bool,
        needs_targets: bool,
    ) -> Result<Option<Resident<D>>> {
        let dataset = batches.dataset();
        let input_len = if needs_inputs { dataset.features().len() } else { 0 };
        let target_len = if needs_targets { dataset.targets().len() } else { 0 };
        let (num_samples, len) = (dataset.num_samples(), input_len + target_len);
        let bytes = num_samples.saturating_mul(len).saturating_mul(size_of::<f32>());
        if len == 0 || bytes > device.sample_budget() || num_samples > MOST_SAMPLES {
            return Ok(None);
        }
        let allocate = |len| device.allocate(len, Role::Exact);
        let [inputs, targets, numbers] =
            [num_samples * input_len, num_samples * target_len, rows].map(allocate);
        let (Ok(mut inputs), Ok(mut targets), Ok(numbers)) = (inputs, targets, numbers) else {
            // another process of the device has taken the memory: train without it
            return Ok(None);
        };
        let chunk = (CHUNK / len).max(1);
        for start in (0..num_samples).step_by(chunk) {
            let _span = trace::work(Name::Read);
            let samples = start..num_samples.min(start + chunk);
            let range = |len: usize| samples.start * len..samples.end * len;
            device.write(device.view_mut(&mut inputs, range(input_len)), &mut |inputs| {
                let targets = device.view_mut(&mut targets, range(target_len));
                device.write(targets, &mut |targets| batches.read_samples(samples.clone(), inputs, targets))
            })?;
        }
        Ok(Some(Resident { inputs, targets, numbers, input_len, target_len, num_samples }))
    }

    /// Returns the number of samples.
    pub(super) fn num_samples(&self) -> usize {
        self.num_samples
    }

    /// Writes the numbers of a micro-batch's samples.
    fn write_numbers(&mut self, device: &D, samples: &[usize]) -> Result<()> {
        device.write(device.view_mut(&mut self.numbers, 0..samples.len()), &mut |numbers| {
            for (number, sample) in numbers.iter_mut().zip(samples) {
                *number = f32::from_bits(*sample as u32);
            }
            Ok(())
        })
    }
}

/// A replica's rows of a global batch, in micro-batches.
pub(super) struct Rows<'b, D: Device> {
    pub(super) batches: &'b mut Batches,
    pub(super) resident: Option<&'b mut Resident<D>>,
    pub(super) seed: u64,
    pub(super) step: u64,
    pub(super) parts: Parts,
    /// True if the numbers of the only micro-batch's samples are on the device.
    pub(super) has_numbers: bool,
}

/// The cut of a replica's rows into micro-batches.
pub(super) enum Parts {
    /// The rows of a step.
    Step {
        /// The division of the batch.
        division: BatchDivision,
        /// The number of rows of the batch.
        len: usize,
        /// The number of the replica.
        replica: usize,
    },
    /// Consecutive rows of which no sums are formed, in parts of equal length but the last.
    Full {
        /// The rows.
        share: Range<usize>,
        /// The number of rows of a part.
        most: usize,
    },
}

impl Parts {
    fn part(&self, micro_batch: usize) -> Range<usize> {
        match self {
            Parts::Step { division, len, replica } => division.section(*len, *replica, micro_batch).terms(),
            Parts::Full { share, most } => {
                let at = |part: usize| share.end.min(share.start + part * most);
                at(micro_batch)..at(micro_batch + 1)
            }
        }
    }
}

impl<D: Device> MicroBatchSource<D> for Rows<'_, D> {
    fn section(&self, micro_batch: usize) -> Section {
        match &self.parts {
            Parts::Step { division, len, replica } => division.section(*len, *replica, micro_batch),
            parts => Section::of_chain(parts.part(micro_batch).len(), false),
        }
    }

    fn draws(&self, micro_batch: usize) -> Option<Draws> {
        match &self.parts {
            Parts::Step { .. } => Some(Draws {
                seed: self.seed,
                step: self.step as u32,
                first_row: self.parts.part(micro_batch).start,
            }),
            Parts::Full { .. } => None,
        }
    }

    fn begin_repeated(&mut self, device: &D) -> Result<bool> {
        let Some(resident) = &mut self.resident else { return Ok(false) };
        resident.write_numbers(device, self.batches.samples(self.step, self.parts.part(0)))?;
        self.has_numbers = true;
        Ok(true)
    }

    fn load(
        &mut self,
        device: &D,
        micro_batch: usize,
        inputs: D::ViewMut<'_>,
        targets: D::ViewMut<'_>,
    ) -> Result<()> {
        let part = self.parts.part(micro_batch);
        let _span = trace::work(Name::Read);
        let (batches, step) = (&mut *self.batches, self.step);
        let Some(resident) = &mut self.resident else {
            return read_rows(device, batches, step, part, inputs, targets);
        };
        if !self.has_numbers {
            resident.write_numbers(device, batches.samples(step, part.clone()))?;
        }
        let Resident { inputs: all_inputs, targets: all_targets, input_len, target_len, num_samples, .. } =
            &**resident;
        let numbers = device.view(&resident.numbers, 0..part.len());
        let [input_table, target_table] = [(all_inputs, *input_len), (all_targets, *target_len)]
            .map(|(table, columns)| device.view(table, 0..*num_samples * columns));
        device.gather_rows(
            numbers,
            GatheredRows { columns: *input_len, table: input_table, into: inputs },
            GatheredRows { columns: *target_len, table: target_table, into: targets },
        );
        Ok(())
    }
}

/// Writes the samples at `rows` of the batch of `step`. Not collective.
///
/// # Errors
/// A sample cannot be read.
pub(super) fn read_rows<D: Device>(
    device: &D,
    batches: &mut Batches,
    step: u64,
    rows: Range<usize>,
    inputs: D::ViewMut<'_>,
    targets: D::ViewMut<'_>,
) -> Result<()> {
    let mut targets = Some(targets);
    device.write(inputs, &mut |inputs| {
        let targets = targets.take().expect("a device lets its memory be written once");
        device.write(targets, &mut |targets| batches.read(step, rows.clone(), inputs, targets))
    })
}
