//! The bubble of each pipeline schedule, measured beside its theory: `make bench`, or `cargo bench
//! --bench bubble`.
//!
//! Four ranks run the real engine with real messages. At the end of each pass through a layer they sleep
//! until it has taken its nominal time, of which computing is a small part, whatever the load and the
//! number of cores.

#[path = "../tests/support/mod.rs"]
mod support;

use std::cell::Cell;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use phalanx::Result;
use phalanx::app::Trace;
use phalanx::comm::{Grid, GridShape, World};
use phalanx::dataset::{Batches, Order, Sampler, Synthetic, Targets};
use phalanx::device::Cpu;
use phalanx::nn::{Features, Network};
use phalanx::optim::{LearningRateSchedule, OptimizerSettings, Rule};
use phalanx::parallel::data::SyncSettings;
use phalanx::parallel::layout::ParallelPlan;
use phalanx::parallel::schedule::PipelineScheduleKind;
use phalanx::parallel::zero::{Accumulation, Gathering};
use phalanx::trace::{self, Event, Name};
use phalanx::train::{RunRequests, Trainer, TrainerSettings, name_of};
use support::mpiexec;

const RANKS: usize = 4;
const MICRO_BATCHES: usize = 8;
const LAYERS: usize = 8;
const STEPS: u64 = 6;

/// Rows of a micro-batch and width of the layers, for messages of 64 KiB, which MPI sends by
/// rendezvous instead of copying them. Narrow layers compute little.
const ROWS: usize = 1024;
const WIDTH: usize = 16;

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
    println!("{RANKS} ranks, {MICRO_BATCHES} micro-batches, passes of {UNIT:?} a layer");
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
    let device = Cpu::new(1)?;
    let mut trainer = Trainer::new(&device, &grid, &model, &plan, settings)?;
    let set = Synthetic::open(Features::Flat(WIDTH), Targets::Nothing, 0, batch_size, 1)?;
    let mut batches = Batches::new(set, Sampler::new(batch_size, batch_size, Order::Sequential, 1), None);
    trace::at_end(sleep_in_layers);
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

thread_local! {
    /// For each stage, the number of micro-batches whose gradients of weights have been computed.
    static NUM_DONE: Cell<[i64; 2 * RANKS]> = const { Cell::new([0; 2 * RANKS]) };
}

/// Sleeps if a layer ends the list of `spans`, until its pass has taken its nominal time. The first layer
/// takes as long as others, as if it had a gradient of inputs.
fn sleep_in_layers(spans: &[Event]) {
    let mut num_done = NUM_DONE.get();
    match spans {
        [.., pass, layer] if layer.name() == Name::Layer => {
            let units = match pass.name() {
                Name::Forward | Name::InputGradient => 1,
                Name::Backward => 2,
                // one for each micro-batch whose products are formed together
                Name::WeightGradient => pass.micro_batch + 1 - num_done[pass.stage as usize],
                _ => 0,
            };
            let end = layer.start + units * UNIT.as_nanos() as i64;
            std::thread::sleep(Duration::from_nanos(u64::try_from(end - trace::now()).unwrap_or(0)));
        }
        [.., pass] if pass.name() == Name::WeightGradient => {
            num_done[pass.stage as usize] = (pass.micro_batch + 1) % MICRO_BATCHES as i64;
            NUM_DONE.set(num_done);
        }
        _ => {}
    }
}
