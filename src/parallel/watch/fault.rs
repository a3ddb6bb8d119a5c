//! [`Fault`], a bit that is flipped on purpose, to try an audit out.

use std::str::FromStr;

use clap::ValueEnum;

use super::site::Site;
use crate::Result;
use crate::device::Device;
use crate::parallel::stage::{ObservedArray, Stage};

/// The value in which a bit is flipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FaultKind {
    /// A result of a layer, forward or backward
    Product,
    /// A parameter before the step
    Weight,
    /// The gradient of a parameter
    Gradient,
    /// A parameter after its update
    Update,
    /// A value that has been received
    Message,
    /// A parameter after its update, on this rank alone: where replicas share updates, as it was received
    Received,
}

/// A bit that is flipped on one rank, once or from a step on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// The value.
    pub kind: FaultKind,
    /// The rank.
    pub rank: usize,
    /// The step, from 1.
    pub step: u64,
    /// True if the fault comes back in every later step.
    pub is_stuck: bool,
    /// The number that chooses the array, the element and the bit.
    pub choice: u64,
}

impl FromStr for Fault {
    type Err = String;

    /// Reads `KIND:RANK:STEP`, perhaps with `:stuck` or `:CHOICE` behind.
    fn from_str(text: &str) -> std::result::Result<Fault, String> {
        let expected = "expected KIND:RANK:STEP, such as product:1:20, where KIND is product, weight, \
                        gradient, update, message or received";
        let mut fields = text.split(':');
        let mut next = || fields.next().ok_or(expected);
        let kind = FaultKind::from_str(next()?, false).map_err(|_| expected)?;
        let rank = next()?.parse().map_err(|_| expected)?;
        let step = next()?.parse().map_err(|_| expected)?;
        let (mut is_stuck, mut choice) = (false, 1);
        for more in fields {
            match more.parse() {
                Ok(number) => choice = number,
                Err(_) if more == "stuck" => is_stuck = true,
                Err(_) => return Err(expected.into()),
            }
        }
        Ok(Fault { kind, rank, step, is_stuck, choice })
    }
}

impl Fault {
    /// Returns true if the fault happens in `step`, from 1, on `rank`.
    pub fn happens(&self, step: u64, rank: usize) -> bool {
        self.rank == rank && (self.step == step || self.is_stuck && self.step < step)
    }

    /// Returns the array of a leaf's work in which a bit is flipped, if the fault is of such a kind:
    /// `tensors` are the numbers in the model of those of the `stages` of this rank.
    pub fn site(&self, stages: &[Stage], tensors: &[usize]) -> Option<Site> {
        let mut sites = Vec::new();
        for stage in stages {
            let (index, last) = (stage.index, stage.num_pieces());
            let value = |point| Site::Value { stage: index, point, part: 0 };
            let gradient = |point| Site::Gradient { stage: index, point, part: 0 };
            match self.kind {
                FaultKind::Product => {
                    sites.extend((1..=last).filter(|at| stage.is_layer(at - 1)).map(value));
                    let has_gradient = |at: &usize| stage.is_layer(*at) && stage.needs_gradient(*at);
                    sites.extend((0..last).filter(has_gradient).map(gradient));
                }
                FaultKind::Gradient => {
                    let own = tensors[stage.tensors.clone()].iter();
                    sites.extend(own.map(|tensor| Site::WeightGradient { stage: index, tensor: *tensor }));
                }
                FaultKind::Message => {
                    sites.extend((index > 0).then(|| value(0)));
                    sites.extend(stage.head.is_none().then(|| gradient(last)));
                    sites.extend((1..=last).filter(|at| !stage.is_layer(at - 1)).map(value));
                }
                FaultKind::Weight | FaultKind::Update | FaultKind::Received => {}
            }
        }
        sites.get(self.choice as usize % sites.len().max(1)).copied()
    }
}

/// Flips a bit in the first `len` of the `rows` of a sum in `array`, by the number `choice`. Not
/// collective.
///
/// # Errors
/// A transfer from or to the device failed.
pub fn flip_row<D: Device>(
    device: &D,
    array: &mut ObservedArray<'_, D>,
    rows: usize,
    len: usize,
    choice: u64,
) -> Result<()> {
    let start = (choice / 32) as usize % array.num_sums.max(1) * rows * array.width;
    flip(device, array.buffer, start, len * array.width, choice)
}

/// Flips a bit of one of the `len` elements of `buffer` from `first` on, by the number `choice`. Not
/// collective.
///
/// # Errors
/// A transfer from or to the device failed.
pub fn flip<D: Device>(
    device: &D,
    buffer: &mut D::Buffer,
    first: usize,
    len: usize,
    choice: u64,
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let at = first + (choice / 64) as usize % len;
    let mut value = 0.0;
    device.read(device.view(buffer, at..at + 1), &mut |values| {
        value = values[0];
        Ok(())
    })?;
    device.write(device.view_mut(buffer, at..at + 1), &mut |values| {
        values[0] = f32::from_bits(value.to_bits() ^ 1 << (choice % 32));
        Ok(())
    })
}
