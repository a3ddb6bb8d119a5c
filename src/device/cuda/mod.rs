//! NVIDIA GPUs: kernels compiled at start for the device found, matrix products by cuBLASLt, everything in one stream.
//!
//! Nothing of CUDA is needed to build, nor to run without it: the driver and its libraries are loaded when [`Cuda::open`] is called.
//! Operations only start work on the device and return; [`Device::read`] waits for it. What goes wrong in between is kept and
//! returned by the next transfer to or from the host.
//!
//! With [`Precision::Bf16`], activations and their gradients are kept in bf16, and parameters in `f32` with a copy in bf16 that
//! the optimizer renews; sums, losses, gradients of parameters and the optimizer's state are `f32`.
//!
//! # In the training programs
//!
//! ```text
//! mpiexec -n 4 sync_sgd --device cuda --precision bf16
//! ```
//!
//! Every training program, strategy and checkpoint works on NVIDIA GPUs: Volta or later, with a driver
//! for CUDA 12.0 or later. `--device cuda` loads the driver, NVRTC and cuBLASLt; whatever is missing is
//! named, with exit code 2. `--device auto` then computes on the CPU and says why. The ranks of a node
//! take its GPUs in turn, and share them if there are more ranks than GPUs.
//!
//! * `--precision f32` (the default) gives the CPU's numbers to the rounding. `tf32` rounds the
//!   factors of products to 10 bits. `bf16` keeps activations and the factors of products in bfloat16,
//!   and everything that accumulates over time (parameters, optimizer, gradients of parameters, sums)
//!   in f32. A run may be resumed in another precision or on another device.
//! * Kernels are compiled at start for the GPU found, in one or two seconds. A step of a single rank
//!   with one micro-batch and no clipping is recorded as one CUDA graph. Training samples stay on the
//!   GPU if they fit into an eighth of its free memory and 2 GiB.
//! * The host is one step ahead: it reads the result of a step when the next one has begun, so a
//!   requested stop takes effect after at most two steps. The host waits for the GPU only for the
//!   result of the last step, for messages between ranks, and for the norm if the gradient is clipped.
//! * With `--trace` the host waits for every layer to measure its time; steps take longer then.
//! * If MPI says that it accepts GPU memory (`MPIX_Query_cuda_support`), messages use it directly, and
//!   a kernel adds them. Otherwise values are staged through pinned host memory in chunks, which are
//!   copied, sent and added while other chunks are, and while the GPU computes. Both ways give the
//!   same bits, except for subnormal numbers, which the CPU takes for zero; bfloat16 is sent as such.
//!   `--device-transfers aware` or `staged` forces one way, and `--probe FILE` follows the findings of
//!   `probe`. An MPI that would crash is refused.
//!
//! `make bench-gpu` measures steps beside PyTorch's on the same card. On a machine without a GPU,
//! `make test` runs all of this on an emulated one (`tests/cuda/emulator`): the same kernels, compiled
//! for the CPU, run as late and as far out of order as CUDA allows.
#![allow(unsafe_code)]

mod compile;
mod convolution;
mod elementwise;
mod kernels;
mod linear;
mod machine;
mod matmul;
mod memory;
mod message;
mod readings;
mod recording;
mod shared;
mod upload;

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use cudarc::driver::result;

use super::{
    Activation, AdamStep, BlockShape, ConvolutionShape, Device, LinearShape, LossShape, PoolShape, Role,
    SgdStep, totals,
};
use crate::Result;
pub use compile::{SOURCES, Source, compile};
use matmul::Products;
pub use memory::{CudaBuffer, CudaView, CudaViewMut};
use memory::{DeviceMemory, Format, Pinned};
use message::MessageMemory;
pub use readings::TotalsReading;
use readings::{MAILBOX_LEN, Readings};
pub use recording::Recording;
pub use shared::Counters;
use shared::Shared;
use upload::Uploads;

/// How exact products of matrices are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// `f32` throughout.
    F32,
    /// Factors rounded to 10 bits of mantissa, sums in `f32`.
    Tf32,
    /// Factors kept in bf16, 7 bits of mantissa, sums in `f32`.
    Bf16,
}

/// Samples stay on the device only if they take no more than this: every rank reads them all before the first step.
const MOST_SAMPLE_BYTES: usize = 2 << 30;

/// A GPU as a [`Device`].
pub struct Cuda {
    shared: Rc<Shared>,
    products: Products,
    uploads: Uploads,
    precision: Precision,
    num_devices: usize,
    /// Memory for parts of sums.
    scratch: RefCell<DeviceMemory>,
    scratch_len: Cell<usize>,
    /// How many blocks have left their parts of a sum: 0 between kernels.
    arrived: DeviceMemory,
    mailbox: RefCell<Pinned>,
    readings: Readings,
}

impl Cuda {
    /// The device of the rank that is number `local_rank` on its node: ranks take turns, so several may share a device. Not
    /// collective.
    ///
    /// # Errors
    /// The driver, a library or a device is missing or too old, or the device has not enough memory left.
    pub fn open(local_rank: usize, precision: Precision) -> Result<Cuda> {
        let machine = machine::open(local_rank)?;
        let num_devices = machine.num_devices;
        let shared = Rc::new(Shared::new(machine)?);
        let scratch_len = 2 * shared.most_blocks();
        Ok(Cuda {
            products: Products::new(&shared, precision)?,
            uploads: Uploads::new(),
            precision,
            num_devices,
            scratch: RefCell::new(DeviceMemory::zeroed(&shared, scratch_len, Format::F32)?),
            scratch_len: Cell::new(scratch_len),
            arrived: DeviceMemory::zeroed(&shared, 2, Format::F32)?,
            mailbox: RefCell::new(Pinned::new(&shared, MAILBOX_LEN)?),
            readings: Readings::new(&shared)?,
            shared,
        })
    }

    /// The name of the device and its number.
    pub fn name(&self) -> String {
        format!("{} (device {} of {})", self.shared.name, self.shared.ordinal, self.num_devices)
    }

    /// The number of devices that this rank sees.
    pub fn num_devices(&self) -> usize {
        self.num_devices
    }

    /// How often the host allocated, waited and launched so far.
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// How values of `role` are kept.
    fn format(&self, role: Role) -> Format {
        match (self.precision, role) {
            (Precision::Bf16, Role::Activations) => Format::Bf16,
            _ => Format::F32,
        }
    }

    /// Memory for the sum of each block of a [`Shared::over`] launch.
    fn partials(&self) -> u64 {
        self.scratch.borrow().pointer()
    }

    /// Memory for `len` floats that the next operations may use, or nothing after a failure.
    fn scratch(&self, len: usize) -> Option<u64> {
        if len > self.scratch_len.get() {
            match DeviceMemory::new(&self.shared, len, Format::F32) {
                Ok(memory) => {
                    // the old memory is freed when the device is done with it
                    self.scratch.replace(memory);
                    self.scratch_len.set(len);
                }
                Err(error) => {
                    self.shared.fail("making room for sums", error);
                    return None;
                }
            }
        }
        Some(self.scratch.borrow().pointer())
    }
}

impl Device for Cuda {
    type Buffer = CudaBuffer;
    type View<'a> = CudaView<'a>;
    type ViewMut<'a> = CudaViewMut<'a>;
    type Totals = TotalsReading;
    type Recording = Recording;

    fn allocate(&self, len: usize, role: Role) -> Result<CudaBuffer> {
        let format = self.format(role);
        let has_copy = self.precision == Precision::Bf16 && role == Role::Parameters;
        let copy = has_copy.then(|| DeviceMemory::zeroed(&self.shared, len, Format::Bf16)).transpose()?;
        let memory = DeviceMemory::zeroed(&self.shared, len, format)?;
        Ok(CudaBuffer {
            shared: Rc::clone(&self.shared),
            memory,
            len,
            format,
            copy,
            messages: MessageMemory::default(),
        })
    }

    fn view<'a>(&self, buffer: &'a CudaBuffer, range: Range<usize>) -> CudaView<'a> {
        buffer.view(range)
    }

    fn view_mut<'a>(&self, buffer: &'a mut CudaBuffer, range: Range<usize>) -> CudaViewMut<'a> {
        buffer.view_mut(range)
    }

    fn write(&self, into: CudaViewMut<'_>, fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        self.shared.check()?;
        self.uploads.write(&self.shared, &into, fill)
    }

    fn read(&self, from: CudaView<'_>, look: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        self.read_values(from, look)
    }

    fn start_totals(&self, sums: CudaView<'_>) -> Result<TotalsReading> {
        self.readings.start(&self.shared, sums)
    }

    fn finish_totals(&self, reading: TotalsReading) -> Result<[f32; totals::LEN]> {
        self.readings.finish(&self.shared, reading)
    }

    fn wait(&self) {
        self.shared.synchronise();
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn room_for_samples(&self) -> usize {
        // others may share the device, evaluation wants memory too, and whoever starts a job does not wait long for it to begin
        result::mem_get_info().map_or(0, |(free, _)| MOST_SAMPLE_BYTES.min(free / 8))
    }

    fn repeat(&self, recording: &mut Option<Recording>, work: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        recording.get_or_insert_default().repeat(&self.shared, self.scratch_len.get(), work)
    }

    fn gather_rows(&self, columns: usize, table: CudaView<'_>, numbers: CudaView<'_>, into: CudaViewMut<'_>) {
        self.gather(columns, table, numbers, &into);
    }

    fn fill(&self, into: CudaViewMut<'_>, value: f32) {
        self.fill_all(&into, value);
    }

    fn copy(&self, from: CudaView<'_>, into: CudaViewMut<'_>) {
        self.copy_values(from, &into);
    }

    fn copy_block(&self, shape: &BlockShape, from: CudaView<'_>, into: CudaViewMut<'_>) {
        self.copy_rows(shape, from, &into);
    }

    fn linear_forward(
        &self,
        shape: &LinearShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        bias: Option<CudaView<'_>>,
        activation: Activation,
        saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        self.forward(shape, input, (weight, bias), activation, &saved, &output);
    }

    fn linear_backward_weight(
        &self,
        shape: &LinearShape,
        input: CudaView<'_>,
        gradient: CudaView<'_>,
        weight_gradient: CudaViewMut<'_>,
        accumulate: bool,
    ) {
        self.backward_weight(shape, input, gradient, &weight_gradient, accumulate);
    }

    fn linear_backward_input(
        &self,
        shape: &LinearShape,
        gradient: CudaView<'_>,
        weight: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
        before: Option<(Activation, CudaView<'_>)>,
    ) {
        self.backward_input(shape, gradient, weight, &input_gradient, before);
    }

    fn fuses_backward(&self, activation: Activation) -> bool {
        self.precision == Precision::Bf16 && activation == Activation::Gelu
    }

    fn activation_forward(
        &self,
        activation: Activation,
        input: CudaView<'_>,
        saved: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        self.activate(activation, 1, input, None, &saved, &output);
    }

    fn backward_activation(
        &self,
        activation: Activation,
        columns: usize,
        saved: CudaView<'_>,
        gradient: CudaViewMut<'_>,
        bias_gradient: Option<CudaViewMut<'_>>,
        accumulate: bool,
    ) {
        self.unactivate(activation, columns, saved, &gradient, bias_gradient, accumulate);
    }

    fn convolution_forward(
        &self,
        shape: &ConvolutionShape,
        input: CudaView<'_>,
        weight: CudaView<'_>,
        bias: CudaView<'_>,
        route: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        self.convolve(shape, input, [weight, bias], &route, &output);
    }

    fn convolution_backward_weight(
        &self,
        shape: &ConvolutionShape,
        input: CudaView<'_>,
        route: CudaView<'_>,
        gradient: CudaView<'_>,
        weight_gradient: CudaViewMut<'_>,
        accumulate: bool,
    ) {
        self.convolve_backward_weight(shape, input, [route, gradient], &weight_gradient, accumulate);
    }

    fn convolution_backward_input(
        &self,
        shape: &ConvolutionShape,
        weight: CudaView<'_>,
        route: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        self.convolve_backward_input(shape, weight, [route, gradient], &input_gradient);
    }

    fn max_pool_forward(
        &self,
        shape: &PoolShape,
        input: CudaView<'_>,
        route: CudaViewMut<'_>,
        output: CudaViewMut<'_>,
    ) {
        self.pool(shape, input, &route, &output);
    }

    fn max_pool_backward(
        &self,
        shape: &PoolShape,
        route: CudaView<'_>,
        gradient: CudaView<'_>,
        input_gradient: CudaViewMut<'_>,
    ) {
        self.unpool(shape, [route, gradient], &input_gradient);
    }

    fn transpose_each(&self, rows: usize, columns: usize, input: CudaView<'_>, output: CudaViewMut<'_>) {
        self.transpose(rows, columns, input, &output);
    }

    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: CudaView<'_>,
        labels: CudaView<'_>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        self.cross_entropy_loss(shape, logits, labels, &gradient, &sums);
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: CudaView<'_>,
        targets: Option<CudaView<'_>>,
        gradient: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        self.squared_error(shape, output, targets, &gradient, &sums);
    }

    fn sgd_step(
        &self,
        step: &SgdStep,
        update: CudaView<'_>,
        parameters: CudaViewMut<'_>,
        gradients: CudaView<'_>,
        momentum: CudaViewMut<'_>,
        sums: CudaViewMut<'_>,
    ) {
        self.sgd((step, update), &parameters, gradients, &momentum, &sums);
    }

    fn adam_step(
        &self,
        step: &AdamStep,
        update: CudaView<'_>,
        parameters: CudaViewMut<'_>,
        gradients: CudaView<'_>,
        moments: [CudaViewMut<'_>; 2],
        sums: CudaViewMut<'_>,
    ) {
        self.adam((step, update), &parameters, gradients, moments, &sums);
    }

    fn sum_squares(&self, values: CudaView<'_>, sums: CudaViewMut<'_>) {
        self.squares(values, &sums);
    }
}
