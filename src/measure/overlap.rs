//! [`overlap`]: measures the part of an operation's time that a [`Computation`] hides.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::Instant;

use super::Meanwhile;
use super::contender::Contender;
use crate::Result;
use crate::comm::{Communicator, Operation};
use crate::device::{Device, LinearShape, Role, WeightLayout};

/// A computation of adjustable length.
pub trait Computation {
    /// Starts `units` units of the computation.
    fn start(&self, units: usize);

    /// Blocks until everything that was started is done.
    fn wait(&self);
}

/// Arithmetic on the host's processor that needs no memory.
pub struct HostComputation;

impl Computation for HostComputation {
    fn start(&self, units: usize) {
        let mut x = black_box(0.5_f32);
        for _ in 0..units {
            x = x * 1.000_001 + 1e-9;
        }
        black_box(x);
    }

    fn wait(&self) {}
}

/// Products of small matrices on a device, one after the other.
pub struct DeviceComputation<'a, D: Device> {
    device: &'a D,
    factors: [D::Buffer; 2],
    product: RefCell<D::Buffer>,
}

/// Rows and columns of the matrices, whose product takes a device a few microseconds.
const SIDE: usize = 256;

impl<'a, D: Device> DeviceComputation<'a, D> {
    /// Allocates the matrices. Not collective.
    ///
    /// # Errors
    /// The device does not have enough memory for the matrices.
    pub fn new(device: &'a D) -> Result<DeviceComputation<'a, D>> {
        let matrix = |role| device.allocate(SIDE * SIDE, role);
        let factors = [matrix(Role::Activations)?, matrix(Role::Parameters)?];
        Ok(DeviceComputation { device, factors, product: RefCell::new(matrix(Role::Activations)?) })
    }
}

impl<D: Device> Computation for DeviceComputation<'_, D> {
    fn start(&self, units: usize) {
        let shape = LinearShape::whole(SIDE, SIDE, SIDE, WeightLayout::OutputsByInputs, 8);
        let ([one, other], all) = (&self.factors, 0..SIDE * SIDE);
        let mut product = self.product.borrow_mut();
        for _ in 0..units {
            let (one, other) = (self.device.view(one, all.clone()), self.device.view(other, all.clone()));
            let into = self.device.view_mut(&mut product, all.clone());
            self.device.linear_backward_input(&shape, one, other, into);
        }
    }

    fn wait(&self) {
        self.device.wait();
    }
}

/// The shortest time of a calibration, in seconds.
const LONG_ENOUGH: f64 = 2e-3;

/// The number of slices of a computation. The operation is tested between them, as a backward pass
/// does between its layers.
const SLICES: usize = 16;

/// Starts `units` of the computation in slices, and calls `between` after each.
fn in_slices(
    computation: &dyn Computation,
    units: usize,
    between: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    for slice in 0..SLICES {
        computation.start((slice + 1) * units / SLICES - slice * units / SLICES);
        between()?;
    }
    Ok(())
}

/// Measures how much of an operation's time, about `estimate` in seconds, a computation of equal
/// length hides, in percent: 100 if the two together take no longer than the computation alone, 0
/// if they take as long as one after the other. The three are measured alternately, each once after
/// a barrier. Collective.
///
/// # Errors
/// There is no memory for messages.
pub fn overlap(
    all: &Communicator,
    contender: &mut Contender<'_>,
    computation: &dyn Computation,
    estimate: f64,
) -> Result<f64> {
    let slowest = |mut samples: Vec<f64>| -> Result<f64> {
        all.all_reduce(&mut samples, Operation::Max)?;
        samples.sort_unstable_by(f64::total_cmp);
        Ok(samples[samples.len() / 2])
    };
    let compute = |units: usize| {
        all.barrier();
        let start = Instant::now();
        in_slices(computation, units, &mut || Ok(()))?;
        computation.wait();
        slowest(vec![start.elapsed().as_secs_f64()])
    };
    // as many units as take as long as the operation
    let (mut units, mut took) = (1, 0.0);
    // a device prepares its first computation
    compute(1)?;
    while took < LONG_ENOUGH {
        units *= 2;
        // the shortest, because others may have had the processor
        took = compute(units)?.min(compute(units)?).min(compute(units)?);
    }
    let units = ((estimate / took * units as f64) as usize).max(1);
    let mut run = |meanwhile: Meanwhile<'_>| -> Result<f64> {
        all.barrier();
        let start = Instant::now();
        contender.run(meanwhile)?;
        computation.wait();
        Ok(start.elapsed().as_secs_f64())
    };
    let (mut together, mut computing, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..((0.1 / estimate) as usize).clamp(5, 50) {
        alone.push(run(&mut |test| test())?);
        together.push(run(&mut |test| in_slices(computation, units, test))?);
        computing.push(compute(units)?);
    }
    let (together, computing, alone) = (slowest(together)?, slowest(computing)?, slowest(alone)?);
    Ok((100.0 * (alone + computing - together) / alone).clamp(0.0, 100.0))
}
