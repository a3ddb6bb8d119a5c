//! Collective operations, shown and measured.
//!
//! ```text
//! mpiexec -n 4 collectives --demo             every rank's values before and after each operation
//! mpiexec -n 2 collectives                    time and bandwidth of every operation, size by size
//! mpiexec -n 2 collectives --compare          beside MPI's own operations, measured alternately
//! mpiexec -n 2 collectives --device cuda      on the memory of GPUs
//! mpiexec -n 2 collectives --operation all-reduce --from 1MiB --algorithm ring --chunk 1MiB
//! ```
//!
//! The algorithm bandwidth is the size of the buffer over the time. The bus bandwidth is the bytes
//! that the busiest link carries over the time, as nccl-tests define it, so it can be compared with
//! that of the hardware.

use std::process::ExitCode;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Parser, ValueEnum as _};
use phalanx::app::{CommonOptions, Program, print_line};
use phalanx::comm::{Algorithm, Choice, Communicator, World, library_version, ranks_on_nodes};
use phalanx::measure::{
    Bench, BenchSettings, CallForm, DeviceBench, HostBench, Measured, OPERATIONS, check_node_room,
    demonstrate, header, operation_named, parse_bytes,
};
use phalanx::train::{AnyDevice, DeviceOptions, Given};
use phalanx::{Error, Result};

/// Show what collective operations do, or measure how fast they are.
#[derive(Parser)]
#[command(name = "collectives", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    given: Given,

    /// Print the values of every rank before and after each operation instead of measuring
    #[arg(long, conflicts_with_all = [
        "operation", "from", "to", "factor", "seconds", "compare", "algorithm", "chunk", "json", "device"
    ])]
    demo: bool,

    /// Operations to measure; all if none is named
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = operations())]
    operation: Vec<Measured>,

    /// Smallest buffer, in bytes
    #[arg(long, value_name = "BYTES", default_value = "8", value_parser = parse_bytes)]
    from: usize,

    /// Largest buffer, in bytes
    #[arg(long, value_name = "BYTES", default_value = "16MiB", value_parser = parse_bytes)]
    to: usize,

    /// Factor from one size to the next
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(2..))]
    factor: u32,

    /// Approximate time to measure a row of the table, and each way with --compare, in seconds
    #[arg(long, default_value_t = 0.1)]
    seconds: f64,

    /// Measure MPI's own operations too, alternately with ours
    #[arg(long)]
    compare: bool,

    /// Use this algorithm where the operation has it, instead of the one that was measured to be
    /// fast
    #[arg(long, value_parser = algorithms())]
    algorithm: Option<Algorithm>,

    /// With --algorithm: cut buffers into chunks of this many bytes
    #[arg(long, value_name = "BYTES", requires = "algorithm", value_parser = parse_bytes)]
    chunk: Option<usize>,

    /// Print JSON lines instead of a table
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    device: DeviceOptions,

    #[command(flatten)]
    common: CommonOptions,
}

fn operations() -> impl TypedValueParser<Value = Measured> {
    let value = |operation: Measured| PossibleValue::new(operation.name).help(operation.description);
    PossibleValuesParser::new(OPERATIONS.map(value))
        .try_map(|name| operation_named(&name).ok_or("there is no such operation"))
}

fn algorithms() -> impl TypedValueParser<Value = Algorithm> {
    // names alone: the library's docs are long for a help text
    let names = Algorithm::value_variants().iter().filter_map(Algorithm::to_possible_value);
    PossibleValuesParser::new(names.map(|value| value.help(None::<&'static str>)))
        .try_map(|name| Algorithm::from_str(&name, false))
}

impl Arguments {
    fn check(&self) -> Result<()> {
        if !self.seconds.is_finite() || self.seconds <= 0.0 {
            return Err(Error::input("--seconds", "it must be a number above 0"));
        }
        if self.from > self.to {
            let why = format!("{} bytes are more than the {} of --to", self.from, self.to);
            return Err(Error::input("--from", why));
        }
        self.device.check_used(&self.given)
    }

    fn settings(&self) -> BenchSettings {
        let choice = |algorithm| Choice { algorithm, chunk: self.chunk.unwrap_or(usize::MAX) };
        BenchSettings { seconds: self.seconds, choice: self.algorithm.map(choice), compare: self.compare }
    }

    fn sizes(&self) -> impl Iterator<Item = usize> {
        let next = |bytes: &usize| bytes.max(&1).checked_mul(self.factor as usize);
        std::iter::successors(Some(self.from), next).take_while(|bytes| *bytes <= self.to)
    }

    fn operations(&self) -> &[Measured] {
        if self.operation.is_empty() { &OPERATIONS } else { &self.operation }
    }
}

fn run(world: &World, arguments: &Arguments) -> Result<()> {
    let all = world.communicator();
    if arguments.demo {
        return demonstrate(all, &print_line);
    }
    all.agree(arguments.check())?;
    log::info!("{}; {}", ranks_on_nodes(world.size(), world.num_nodes()), library_version());
    if world.is_crowded() && world.is_root() {
        log::warn!(
            "there are more ranks than cores: blocking calls are started and polled, and times include \
             the scheduler's"
        );
    }
    let settings = arguments.settings();
    match arguments.device.open(world, 1)? {
        AnyDevice::Cpu(_) => {
            let bench = HostBench { all, settings };
            let num_buffers = arguments.operations().iter().map(|operation| bench.num_buffers(operation));
            let largest = arguments.sizes().last().unwrap_or(0);
            check_node_room(world, "--to", largest.saturating_mul(num_buffers.max().unwrap_or(0)))?;
            print_rows(all, arguments, &bench)
        }
        AnyDevice::Cuda(device) => print_rows(all, arguments, &DeviceBench::new(&device, all, settings)?),
    }
}

/// Prints a row for every operation, size and form that exists.
fn print_rows(all: &Communicator, arguments: &Arguments, bench: &dyn Bench) -> Result<()> {
    if all.is_root() && !arguments.json {
        print_line(&header())?;
    }
    let mut wrong = 0;
    for &operation in arguments.operations() {
        for bytes in arguments.sizes() {
            let len = operation.round_up(bytes.div_ceil(bench.value_bytes()), all.size());
            for form in CallForm::ALL {
                let Some(row) = bench.measure(operation, form, len)? else { continue };
                wrong += row.wrong;
                if all.is_root() {
                    print_line(&if arguments.json { row.json()? } else { row.line() })?;
                }
            }
        }
    }
    if wrong == 0 {
        return Ok(());
    }
    Err(Error::on_every_rank(
        "comparing the values",
        format!("{wrong} elements were wrong, in the rows that say so"),
    ))
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.common
    }
}

fn main() -> ExitCode {
    phalanx::app::main(run)
}
