//! The bubble of each pipeline schedule, measured beside its theory: `make bench`, or `cargo bench
//! --bench bubble`.
//!
//! Four ranks run the real engine with real messages on a device that sleeps instead of computing,
//! so that every pass takes its nominal time, whatever the load and the number of cores.

#[path = "../tests/support/mod.rs"]
mod support;

use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use phalanx::Result;
use phalanx::app::Trace;
use phalanx::comm::{Grid, GridShape, World};
use phalanx::dataset::{Batches, Order, Sampler, Synthetic, Targets};
use phalanx::device::prelude::*;
use phalanx::device::{
    Activation, AttentionShape, BiasShape, BlockShape, ConvolutionShape, CrossEntropyOperands, DropoutShape,
    EmbeddingShape, FusedActivation, Gate, GroupNormShape, LinearShape, LossShape, NormShape, OptimizerStep,
    PoolShape, Role, Rotation, RowSums, WeightOperands, totals,
};
use phalanx::memory::Memory;
use phalanx::nn::{Features, Network};
use phalanx::optim::{LearningRateSchedule, OptimizerSettings, Rule};
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::zero::{Accumulation, Gathering};
use phalanx::trace::{self, Name};
use phalanx::train::{RunRequests, Trainer, TrainerSettings, name_of};
use support::mpiexec;

const RANKS: usize = 4;
const MICRO_BATCHES: usize = 8;
const LAYERS: usize = 8;
const STEPS: u64 = 6;

/// Rows of a micro-batch and width of the layers, for messages of 64 KiB, which MPI sends by
/// rendezvous instead of copying them.
const ROWS: usize = 256;
const WIDTH: usize = 64;

/// The time of a forward pass, of a gradient of inputs, and of one of weights, in one layer.
const UNIT: Duration = Duration::from_millis(4);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("--rank-side") {
        let name = arguments.next().expect("a schedule follows");
        let kind = PipelineScheduleKind::from_str(&name, false).expect("it is one of them");
        measure(kind).expect("nothing can fail here");
        return ExitCode::SUCCESS;
    }
    println!("{RANKS} ranks, {MICRO_BATCHES} micro-batches, passes that sleep {UNIT:?} a layer");
    println!("{:<14} {:>10} {:>10} {:>10} {:>12}", "schedule", "measured", "theory", "off by", "longer by");
    let program = std::env::current_exe().expect("this program has a path");
    for kind in PipelineScheduleKind::value_variants() {
        let done = mpiexec(RANKS, program.clone()).args(["--rank-side", &name_of(kind)]).run().expect(0);
        print!("{}", done.stdout);
    }
    println!(
        "off by: the measured bubble over that of the theory, less 1; \
         longer by: a step over one with that of the theory, less 1"
    );
    ExitCode::SUCCESS
}

fn measure(kind: PipelineScheduleKind) -> Result<()> {
    let world = World::start()?;
    let grid = Grid::new(&world, GridShape { data: 1, stage: RANKS, tensor: 1 })?;
    let model = Network::deep_mlp(WIDTH, LAYERS).build(Features::Flat(WIDTH))?;
    let plan = ParallelPlan::pipeline(&model, kind.generate(RANKS, 2, MICRO_BATCHES)?, Some(&sizes(kind)))?;
    let expected = plan.schedule.check()?.bubble;
    let sync = SyncSettings {
        bucket_bytes: 1 << 20,
        zero: None,
        accumulation: Accumulation::Whole,
        overlap: true,
        clip_norm: None,
    };
    let batch_size = ROWS * MICRO_BATCHES;
    let (optimizer, learning_rate) = (OptimizerSettings::new(Rule::Sgd), LearningRateSchedule::constant(0.0));
    let settings =
        TrainerSettings { batch_size, sync, gathering: Gathering::Pass, optimizer, learning_rate, seed: 1 };
    let mut trainer = Trainer::new(&Sleeper, &grid, &model, &plan, settings)?;
    let set = Synthetic::open(Features::Flat(WIDTH), Targets::Nothing, 0, batch_size, 1)?;
    let mut batches = Batches::new(set, Sampler::new(batch_size, batch_size, Order::Sequential, 1), None);
    trainer.step(0, &mut batches, RunRequests::default)?;
    trainer.flush(RunRequests::default())?;
    let file = tempfile::NamedTempFile::new().expect("there is room for a small file");
    let trace = Trace::start(&world, file.path(), "bubble")?;
    for step in 1..=STEPS {
        let _span = trace::work(Name::Step).step(step);
        trainer.step(step, &mut batches, RunRequests::default)?;
        trainer.flush(RunRequests::default())?;
    }
    if let Some(summary) = trace.finish(&world, Some(expected))? {
        let longer = (1.0 - expected) / (1.0 - summary.bubble) - 1.0;
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        let (measured, theory, off) =
            (percent(summary.bubble), percent(expected), percent(summary.bubble / expected - 1.0));
        println!("{:<14} {measured:>10} {theory:>10} {off:>10} {:>12}", name_of(&kind), percent(longer));
    }
    Ok(())
}

/// Returns the sizes of equal stages.
fn sizes(kind: PipelineScheduleKind) -> Vec<usize> {
    let num_stages = if kind == PipelineScheduleKind::Interleaved { 2 * RANKS } else { RANKS };
    vec![LAYERS / num_stages; num_stages]
}

/// A device on which passes take time and compute nothing. The gradient of a layer's inputs takes
/// its time in the backward pass of its activation, which the first layer has too.
struct Sleeper;

impl Device for Sleeper {}

impl MemoryOperations for Sleeper {
    type Buffer = Memory<f32>;
    type View<'a> = &'a [f32];
    type ViewMut<'a> = &'a mut [f32];
    type Totals = ();
    type Recording = ();

    fn allocate(&self, len: usize, _: Role) -> Result<Memory<f32>> {
        Memory::zeroed(len)
    }

    fn view<'a>(&self, buffer: &'a Memory<f32>, range: Range<usize>) -> &'a [f32] {
        &buffer[range]
    }

    fn view_mut<'a>(&self, buffer: &'a mut Memory<f32>, range: Range<usize>) -> &'a mut [f32] {
        &mut buffer[range]
    }

    fn write(&self, into: &mut [f32], fill: &mut dyn FnMut(&mut [f32]) -> Result<()>) -> Result<()> {
        fill(into)
    }

    fn read(&self, from: &[f32], inspect: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        inspect(from)
    }

    fn start_totals(&self, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn finish_totals(&self, _: ()) -> Result<[f32; totals::LEN]> {
        Ok([0.0; totals::LEN])
    }
}

fn sleep(num_units: u32) {
    if num_units > 0 {
        std::thread::sleep(num_units * UNIT);
    }
}

/// Implements the operations of a family, which take `$time` units each, but for `$more`.
macro_rules! operations {
    ($family:ident: $($name:ident($($argument:ty),*) $time:literal;)* $({ $($more:tt)* })?) => {
        impl $family for Sleeper {
            $(fn $name(&self, $(_: $argument),*) {
                sleep($time);
            })*
            $($($more)*)?
        }
    };
}

type In<'a> = &'a [f32];
type Out<'a> = &'a mut [f32];

operations!(CopyOperations:
    fill(Out<'_>, f32) 0;
    copy(In<'_>, Out<'_>) 0;
    add(In<'_>, Out<'_>) 0;
    copy_block(&BlockShape, In<'_>, Out<'_>) 0;
    transpose_each(usize, usize, In<'_>, Out<'_>) 0;
    gather_rows(usize, In<'_>, In<'_>, Out<'_>) 0;
);
operations!(ActivationOperations:
    activation_forward(Activation, In<'_>, Out<'_>, Out<'_>) 0;
    activation_backward(Activation, BiasShape, In<'_>, Out<'_>, Option<RowSums<Out<'_>>>) 1;
    gated_forward(Gate, usize, In<'_>, Out<'_>) 0;
    gated_backward(Gate, usize, In<'_>, In<'_>, Out<'_>) 0;
    dropout(&DropoutShape, Option<In<'_>>, Out<'_>) 0;
);
operations!(LinearOperations:
    linear_forward(&LinearShape, In<'_>, In<'_>, Option<In<'_>>, Activation, Out<'_>, Out<'_>) 1;
    linear_backward_input(&LinearShape, In<'_>, In<'_>, Out<'_>, Option<FusedActivation<In<'_>>>) 0;
    {
        fn linear_backward_weight(
            &self,
            _: &LinearShape,
            operands: &[WeightOperands<In<'_>>],
            _: RowSums<Out<'_>>,
        ) {
            sleep(operands.len() as u32);
        }
    }
);
operations!(ConvolutionOperations:
    convolution_forward(&ConvolutionShape, In<'_>, In<'_>, Option<In<'_>>, Out<'_>, Out<'_>) 0;
    convolution_backward_weight(&ConvolutionShape, In<'_>, In<'_>, In<'_>, RowSums<Out<'_>>) 0;
    convolution_backward_input(&ConvolutionShape, In<'_>, In<'_>, In<'_>, Out<'_>) 0;
);
operations!(PoolOperations:
    max_pool_forward(&PoolShape, In<'_>, Out<'_>, Out<'_>) 0;
    max_pool_backward(&PoolShape, In<'_>, In<'_>, Out<'_>) 0;
    average_pool_forward(&PoolShape, In<'_>, Out<'_>) 0;
    average_pool_backward(&PoolShape, In<'_>, Out<'_>) 0;
);
operations!(NormOperations:
    layer_norm_forward(&NormShape, In<'_>, In<'_>, Option<In<'_>>, Out<'_>, Out<'_>) 0;
    layer_norm_backward_weight(&NormShape, In<'_>, In<'_>, In<'_>, RowSums<Out<'_>>) 0;
    layer_norm_backward_bias(&NormShape, In<'_>, RowSums<Out<'_>>) 0;
    layer_norm_position_sums(&NormShape, In<'_>, In<'_>, In<'_>, bool, Out<'_>) 0;
    layer_norm_backward_input(&NormShape, In<'_>, In<'_>, In<'_>, In<'_>, Out<'_>) 0;
    group_norm_forward(&GroupNormShape, In<'_>, In<'_>, Option<In<'_>>, Out<'_>, Out<'_>) 0;
    group_norm_backward_weight(&GroupNormShape, In<'_>, In<'_>, In<'_>, RowSums<Out<'_>>) 0;
    group_norm_backward_input(&GroupNormShape, In<'_>, In<'_>, In<'_>, In<'_>, Out<'_>) 0;
);
operations!(AttentionOperations:
    attention_forward(&AttentionShape, In<'_>, Out<'_>, Out<'_>) 0;
    attention_next(&AttentionShape, usize, In<'_>, Out<'_>) 0;
    attention_backward(&AttentionShape, In<'_>, In<'_>, In<'_>, In<'_>, Out<'_>) 0;
    rotate(&AttentionShape, Rotation, Option<In<'_>>, Out<'_>) 0;
);
operations!(EmbeddingOperations:
    embed(&EmbeddingShape, In<'_>, In<'_>, Out<'_>) 0;
    embed_backward(&EmbeddingShape, In<'_>, In<'_>, RowSums<Out<'_>>) 0;
    add_table(In<'_>, In<'_>, Out<'_>) 0;
);
operations!(LossOperations:
    cross_entropy(&LossShape, In<'_>, In<'_>, Out<'_>, Out<'_>) 0;
    find_logit_statistics(&LossShape, In<'_>, In<'_>, Out<'_>) 0;
    sum_exponentials(&LossShape, In<'_>, In<'_>, Out<'_>, Out<'_>) 0;
    finish_cross_entropy(&LossShape, &CrossEntropyOperands<In<'_>>, Out<'_>, Out<'_>) 0;
    mean_squared_error(&LossShape, In<'_>, Option<In<'_>>, Out<'_>, Out<'_>) 0;
);
operations!(OptimizerOperations:
    optimizer_step(&OptimizerStep, In<'_>, Out<'_>, In<'_>, &mut [Out<'_>], Out<'_>) 0;
    sum_squares(In<'_>, Out<'_>) 0;
);
