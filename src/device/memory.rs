//! Contract of a device's memory: allocation, views, transfers, a step's totals and recorded steps.

use std::ops::{AddAssign, Range};

use crate::Result;
use crate::memory::Buffer;
use crate::sums::ExactSum;

/// Indices into the totals of a step, which losses and optimizers add to.
pub mod totals {
    use std::ops::Range;

    use crate::sums::ExactSum;

    /// Sum over rows of the loss, on a device that rounds it; 0 on others.
    pub const LOSS: usize = 0;
    /// Number of rows whose largest output is their label's.
    pub const CORRECT: usize = 1;
    /// Sum of the squares of all gradient elements that the optimizer read.
    pub const GRADIENT_SQUARES: usize = 2;
    /// Number of these.
    pub const NUM_VALUES: usize = 3;
    /// The words of an [`ExactSum`] over rows of the loss, on a device that does not round it.
    pub const EXACT_LOSS: Range<usize> = NUM_VALUES..NUM_VALUES + size_of::<ExactSum>() / size_of::<f32>();
    /// Number of elements of a step's totals.
    pub const LEN: usize = EXACT_LOSS.end;
}

/// A step's totals on the host.
#[derive(Debug, Clone, Copy, Default)]
pub struct StepTotals {
    /// Sum over rows of the loss.
    pub loss: ExactSum,
    /// Number of rows whose largest output is their label's.
    pub correct: f64,
    /// Sum of the squares of all gradient elements that the optimizer read.
    pub gradient_squares: f64,
}

impl StepTotals {
    /// The number of values of a message.
    pub const MESSAGE_LEN: usize = ExactSum::NUM_WORDS + 2;

    /// Returns the totals of a device that rounds them.
    pub fn rounded(values: [f32; totals::NUM_VALUES]) -> StepTotals {
        let values = values.map(f64::from);
        let mut loss = ExactSum::default();
        loss.add(values[totals::LOSS]);
        let [correct, gradient_squares] = [totals::CORRECT, totals::GRADIENT_SQUARES].map(|at| values[at]);
        StepTotals { loss, correct, gradient_squares }
    }

    /// Returns the totals as a message. The sum of the messages of several ranks is that of their totals.
    pub fn into_message(mut self) -> [f64; StepTotals::MESSAGE_LEN] {
        // the words are whole numbers of little more than 32 bits then, which are exact in `f64`
        self.loss.carry();
        let mut message = [0.0; StepTotals::MESSAGE_LEN];
        let (words, values) = message.split_at_mut(ExactSum::NUM_WORDS);
        words.iter_mut().zip(self.loss.words_mut()).for_each(|(value, word)| *value = *word as f64);
        values.copy_from_slice(&[self.correct, self.gradient_squares]);
        message
    }

    /// Returns the totals of a message, or of a sum of messages.
    pub fn from_message(message: &[f64; StepTotals::MESSAGE_LEN]) -> StepTotals {
        let mut totals = StepTotals::default();
        let (words, values) = message.split_at(ExactSum::NUM_WORDS);
        totals.loss.words_mut().iter_mut().zip(words).for_each(|(word, value)| *word = *value as i64);
        (totals.correct, totals.gradient_squares) = (values[0], values[1]);
        totals
    }
}

impl AddAssign for StepTotals {
    fn add_assign(&mut self, other: StepTotals) {
        self.loss += other.loss;
        self.correct += other.correct;
        self.gradient_squares += other.gradient_squares;
    }
}

/// The use of a buffer, from which a device chooses the format of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Parameters, which the optimizer changes and products read: `f32`, with a second copy in the
    /// precision of products where that differs.
    Parameters,
    /// Inputs and outputs of layers and their gradients: in the precision of products.
    Activations,
    /// All other values: `f32`.
    Exact,
}

/// Memory of a device, transfers, and the host's control of work that runs after it is started.
///
/// The default methods are for a device that runs every operation when it is called.
pub trait MemoryOperations {
    /// Memory for values on the device.
    type Buffer: Buffer;
    /// A range of a buffer, to read.
    type View<'a>: Copy;
    /// A range of a buffer, to write.
    type ViewMut<'a>;
    /// A step's totals on their way to the host.
    type Totals;
    /// Operations that were recorded together and can be started again with one call.
    type Recording;

    /// Allocates zeroed memory for `len` elements, in the format that suits `role`.
    ///
    /// # Errors
    /// The device is out of memory.
    fn allocate(&self, len: usize, role: Role) -> Result<Self::Buffer>;

    /// Borrows the elements `range` of `buffer`, to read.
    fn view<'a>(&self, buffer: &'a Self::Buffer, range: Range<usize>) -> Self::View<'a>;

    /// Borrows the elements `range` of `buffer`, to write.
    fn view_mut<'a>(&self, buffer: &'a mut Self::Buffer, range: Range<usize>) -> Self::ViewMut<'a>;

    /// Writes the values that `fill` puts into host memory to `into`.
    ///
    /// # Errors
    /// `fill` or the transfer failed.
    fn write(&self, into: Self::ViewMut<'_>, fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()>;

    /// Waits for all operations started so far and shows the values of `from` to `inspect`.
    ///
    /// # Errors
    /// `inspect`, the transfer or an earlier operation failed.
    fn read(&self, from: Self::View<'_>, inspect: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()>;

    /// Starts to read a step's totals (see [`totals`]), as all operations started so far leave
    /// them, and sets them to 0 for the next.
    ///
    /// # Errors
    /// The transfer or an earlier operation failed.
    fn take_totals(&self, sums: Self::ViewMut<'_>) -> Result<Self::Totals>;

    /// Waits for a step's totals.
    ///
    /// # Errors
    /// The transfer or an earlier operation failed.
    fn finish_totals(&self, reading: Self::Totals) -> Result<StepTotals>;

    /// Blocks until all operations started so far are complete.
    fn wait(&self) {}

    /// Returns true if operations run later than they are started: the host should then start the
    /// next step before it asks for the totals of the last.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Returns true if the device's memory is that of the host.
    fn is_on_host(&self) -> bool {
        <Self::Buffer as Buffer>::IS_ON_HOST
    }

    /// Returns the number of bytes that training samples may occupy on the device for the whole
    /// run.
    fn sample_budget(&self) -> usize {
        0
    }

    /// Runs `work`, or starts its recording where the device has one.
    ///
    /// `work` starts the same operations on the same memory each time, transfers nothing from or to
    /// the host, and changes no state of the host that a later call needs. The operations differ in nothing
    /// but the step of their [draws](super::DropoutMask), which is `step`.
    ///
    /// # Errors
    /// `work` or its recording failed.
    fn repeat(
        &self,
        _recording: &mut Option<Self::Recording>,
        _step: u32,
        work: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        work()
    }
}
