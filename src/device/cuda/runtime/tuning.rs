//! Products with the algorithm that was measured to be the fastest, instead of the one that cuBLASLt expects
//! to be.
//!
//! A product is measured on memory of its own, as a recorded graph of many of it, because the host takes
//! longer to start a small product than the device to form it. Memory has the alignment of the product's, and
//! the operands are random: for products of zeros a device needs less power, so that its clock runs faster.

use std::rc::Rc;
use std::time::Instant;

use cudarc::cublaslt::sys::cublasLtEpilogue_t as Kind;
use cudarc::driver::result;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

use super::cublaslt::CublasLt;
use super::format::Format;
use super::machine::explain;
use super::memory::DeviceMemory;
use super::product::{Epilogue, EpilogueFunction, Operand, Product, ProductKey, ProductOutput, encode};
use super::streams::Streams;
use crate::device::{ProductTable, TunedProduct};
use crate::{Error, Result};

/// The most algorithms of a product that are measured.
const MOST_ALGORITHMS: usize = 16;

/// The most random numbers of an operand; they are repeated in a longer one.
const MOST_NUMBERS: usize = 1 << 20;

/// Times that each algorithm is measured; the shortest time counts.
const ROUNDS: usize = 3;

/// Seconds for which a product is repeated in a round, and the most repetitions.
const ROUND_SECONDS: f64 = 1e-3;
const MOST_REPEATS: usize = 50;

/// Another algorithm must take less than this share of the time of cuBLASLt's own choice to replace it.
const WORTHWHILE: f64 = 0.98;

impl CublasLt {
    /// Uses the algorithms of `table` from now on.
    pub(crate) fn use_products(&self, table: &ProductTable) {
        self.tuned.replace(table.clone());
        self.plans.borrow_mut().clear();
    }

    /// Returns the names of the products so far whose algorithm was not in the table.
    pub(crate) fn untuned_products(&self) -> Vec<String> {
        let plans = self.plans.borrow();
        let is_untuned = |key: &ProductKey| plans[key].as_ref().is_some_and(|plan| !plan.is_tuned);
        plans.keys().filter(|key| is_untuned(key)).map(|key| self.name_of(key)).collect()
    }

    /// Measures the algorithms for a product that was formed before; returns `None` if there was none of
    /// that name, there is no memory for matrices of its size, or cuBLASLt refuses.
    ///
    /// # Errors
    /// The device fails.
    pub(crate) fn tune_product(&self, streams: &Rc<Streams>, name: &str) -> Result<Option<TunedProduct>> {
        let plans = self.plans.borrow();
        let found = plans.iter().find(|(key, _)| self.name_of(key) == name);
        let Some((key, Some(plan))) = found else { return Ok(None) };
        let Ok(algorithms) = self.algorithms::<MOST_ALGORITHMS>(&plan.described, key) else {
            return Ok(None);
        };
        let Ok(memory) = ScratchMatrices::new(streams, key) else { return Ok(None) };
        let product = memory.product(key);
        let mut measured = Vec::new();
        for algorithm in &algorithms {
            // an algorithm that cannot be started is not a candidate
            let start = || self.start(streams, &product, &plan.described, algorithm).is_ok();
            measured.extend(time(streams, start)?.map(|seconds| (seconds, algorithm)));
        }
        let Some(&first) = measured.first() else { return Ok(None) };
        let fastest = measured.iter().copied().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or(first);
        let (seconds, algorithm) = if fastest.0 < WORTHWHILE * first.0 { fastest } else { first };
        Ok(Some(TunedProduct {
            algorithm: encode(algorithm),
            microseconds: seconds * 1e6,
            microseconds_of_first: first.0 * 1e6,
            num_measured: measured.len(),
        }))
    }
}

/// Memory for the matrices of a product.
struct ScratchMatrices {
    matrices: [DeviceMemory; 5],
}

impl ScratchMatrices {
    fn new(streams: &Rc<Streams>, key: &ProductKey) -> Result<ScratchMatrices> {
        let [m, n, k] = key.size;
        // room for the shift to an alignment
        let filled = |len: usize, format| random(streams, len + 16, format);
        let zeroed = |len: usize, format| DeviceMemory::zeroed(streams, len + 16, format);
        let [left, right, output] = key.formats;
        let saved = if saves(key.epilogue) { m * n } else { 0 };
        Ok(ScratchMatrices {
            matrices: [
                filled(m * k, left)?,
                filled(k * n, right)?,
                zeroed(m * n, output)?,
                zeroed(saved, Format::F32)?,
                zeroed(m, Format::F32)?,
            ],
        })
    }

    /// Returns a product like that of `key` of these matrices.
    fn product(&self, key: &ProductKey) -> Product {
        let [left, right, output, saved, bias] = [0, 1, 2, 3, 4].map(|at: usize| {
            let alignment = key.alignments.get(at).copied().unwrap_or(16);
            self.matrices[at].pointer() + u64::from(if alignment < 16 { alignment } else { 0 })
        });
        let function = match key.epilogue {
            Kind::CUBLASLT_EPILOGUE_RELU | Kind::CUBLASLT_EPILOGUE_RELU_BIAS => EpilogueFunction::Relu,
            kind if saves(kind) => EpilogueFunction::Gelu { saved },
            _ => EpilogueFunction::Identity,
        };
        let has_bias = matches!(
            key.epilogue,
            Kind::CUBLASLT_EPILOGUE_BIAS
                | Kind::CUBLASLT_EPILOGUE_RELU_BIAS
                | Kind::CUBLASLT_EPILOGUE_GELU_AUX_BIAS
        );
        let operand =
            |at: usize, pointer| Operand { pointer, format: key.formats[at], transposed: key.transposed[at] };
        Product {
            size: key.size,
            left: operand(0, left),
            right: operand(1, right),
            output: ProductOutput { pointer: output, format: key.formats[2] },
            accumulate: key.accumulate,
            epilogue: Epilogue { bias: if has_bias { bias } else { 0 }, function },
        }
    }
}

/// Allocates memory for `len` values, and fills it with random numbers from −1 to 1.
fn random(streams: &Rc<Streams>, len: usize, format: Format) -> Result<DeviceMemory> {
    let memory = DeviceMemory::new(streams, len, format)?;
    let mut generator = ChaCha8Rng::seed_from_u64(0);
    let mut number = || (generator.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0;
    let mut filled = len.min(MOST_NUMBERS);
    // a value in bf16 is the upper half of one in f32
    let bytes: Vec<u8> =
        (0..filled).flat_map(|_| number().to_le_bytes().into_iter().skip(4 - format.bytes())).collect();
    // SAFETY: the memory has at least as many bytes, and the host's are kept until they have been copied.
    let outcome = unsafe { result::memcpy_htod_async(memory.pointer(), &bytes, streams.compute.cu_stream()) };
    streams.note("filling a matrix", outcome);
    while filled < len {
        let more = filled.min(len - filled);
        let into = memory.pointer() + (filled * format.bytes()) as u64;
        // SAFETY: the memory has `len` values, of which as many as are copied are filled.
        unsafe { streams.copy(memory.pointer(), into, more * format.bytes()) };
        filled += more;
    }
    streams.synchronise();
    Ok(memory)
}

/// Returns true if an epilogue saves an array.
fn saves(kind: Kind) -> bool {
    matches!(kind, Kind::CUBLASLT_EPILOGUE_GELU_AUX | Kind::CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
}

/// Returns the seconds that the device takes for what `start` starts; `None` if it cannot be started.
fn time(streams: &Streams, start: impl Fn() -> bool) -> Result<Option<f64>> {
    let elapsed = |launch: &dyn Fn() -> Result<bool>| -> Result<Option<f64>> {
        let begin = Instant::now();
        if !launch()? {
            return Ok(None);
        }
        streams.synchronise();
        streams.check()?;
        Ok(Some(begin.elapsed().as_secs_f64()))
    };
    // the first time may include loading
    for _ in 0..2 {
        if elapsed(&|| Ok(start()))?.is_none() {
            return Ok(None);
        }
    }
    let Some(once) = elapsed(&|| Ok(start()))? else { return Ok(None) };
    let repeats = ((ROUND_SECONDS / once) as usize).clamp(1, MOST_REPEATS);
    let failed = |error| Error::failed("starting recorded products", explain(error));
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    if streams.compute.begin_capture(mode).is_err() {
        return Ok(None);
    }
    let has_started = (0..repeats).all(|_| start());
    // an algorithm that cannot be recorded makes this fail
    let graph = streams.compute.end_capture(CUgraphInstantiate_flags(0)).ok().flatten();
    let Some(graph) = graph.filter(|_| has_started) else { return Ok(None) };
    let mut least = f64::INFINITY;
    // the first launch moves the graph to the device
    for _ in 0..=ROUNDS {
        let launch = || graph.launch().map(|()| true).map_err(failed);
        least = least.min(elapsed(&launch)?.unwrap_or(f64::INFINITY));
    }
    Ok(Some(least / repeats as f64))
}
