//! Point-to-point messages, shown and measured.
//!
//! ```text
//! mpiexec -n 2 ping                   a number from rank 0 to rank 1, then latency and bandwidth
//! mpiexec -n 5 ping --largest 1MiB    with a token around the ring of all five ranks
//! ```
//!
//! Buffers are in host memory. The latency of a message is half the time of a round trip; the bandwidth is
//! the bytes of the message divided by that latency.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use phalanx::app::{CommonOptions, Program, print_line};
use phalanx::comm::{Communicator, World};
use phalanx::measure::{check_node_room, parse_bytes};
use phalanx::{Error, Result};

/// Send messages from rank to rank: a number, a token around a ring, and round trips of growing
/// size with their times.
#[derive(Parser)]
#[command(name = "ping", version, args_override_self = true)]
struct Arguments {
    /// Largest message to measure
    #[arg(long, value_name = "BYTES", default_value = "16MiB", value_parser = parse_bytes)]
    largest: usize,

    /// Number of round trips of each size; the median is reported
    #[arg(
        long,
        value_name = "N",
        default_value_t = 50,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000)
    )]
    repeats: u32,

    #[command(flatten)]
    common: CommonOptions,
}

fn run(world: &World, arguments: &Arguments) -> Result<()> {
    let all = world.communicator();
    let enough = if all.size() >= 2 {
        Ok(())
    } else {
        Err(Error::input("ping", "it takes two ranks: mpiexec -n 2 ping"))
    };
    all.agree(enough)?;
    let largest = arguments.sizes().last().unwrap_or(0);
    check_node_room(world, "--largest", if all.rank() < 2 { largest } else { 0 })?;
    blocking(all)?;
    non_blocking(all)?;
    ring(all)?;
    measure(all, arguments)
}

/// Uses `MPI_Send` and `MPI_Recv`: each returns when its buffer can be used again.
fn blocking(all: &Communicator) -> Result<()> {
    let mut received = vec![0];
    match all.rank() {
        0 => all.send(&[43523], 1, 0)?,
        1 => drop(all.receive(&mut received, 0, 0)?),
        _ => {}
    }
    report(all, "blocking", received)
}

/// Uses `MPI_Isend` and `MPI_Irecv`: started now, waited for later; in between the buffers are
/// MPI's.
fn non_blocking(all: &Communicator) -> Result<()> {
    let mut received = vec![0];
    match all.rank() {
        0 => drop(all.start_send(vec![43523], 1, 0)?.wait()),
        1 => received = all.start_receive(received, 0, 0)?.wait(),
        _ => {}
    }
    report(all, "non-blocking", received)
}

/// Prints on rank 0 what rank 1 received: launchers do not keep the lines of different ranks in
/// order.
fn report(all: &Communicator, how: &str, mut received: Vec<i32>) -> Result<()> {
    all.broadcast(&mut received, 1)?;
    if all.is_root() {
        print_line(&format!("{how}: rank 1 received {} from rank 0", received[0]))?;
    }
    Ok(())
}

/// Passes a token around the ring once; every rank adds its number.
fn ring(all: &Communicator) -> Result<()> {
    let (rank, size) = (all.rank(), all.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut token = [0_i64];
    if rank > 0 {
        all.receive(&mut token, previous, 0)?;
    }
    token[0] += rank as i64;
    all.send(&token, next, 0)?;
    if rank == 0 {
        all.receive(&mut token, previous, 0)?;
        print_line(&format!("ring: the token came back with {}, the sum of 0 to {}", token[0], size - 1))?;
    }
    all.barrier();
    Ok(())
}

fn measure(all: &Communicator, arguments: &Arguments) -> Result<()> {
    if all.is_root() {
        print_line(&format!("{:>12} {:>14} {:>14}", "bytes", "latency [us]", "MB/s"))?;
    }
    for bytes in arguments.sizes() {
        let mut buffer = vec![0_u8; if all.rank() < 2 { bytes } else { 0 }];
        let mut times = Vec::new();
        for _ in 0..arguments.repeats + 2 {
            let start = Instant::now();
            match all.rank() {
                0 => {
                    all.send(&buffer, 1, 0)?;
                    buffer = all.start_receive(buffer, 1, 0)?.wait();
                }
                1 => {
                    buffer = all.start_receive(buffer, 0, 0)?.wait();
                    all.send(&buffer, 0, 0)?;
                }
                _ => {}
            }
            times.push(start.elapsed().as_secs_f64() / 2.0);
        }
        // the first two warm up
        let median = *times[2..].select_nth_unstable_by(arguments.repeats as usize / 2, f64::total_cmp).1;
        if all.is_root() {
            print_line(&format!("{bytes:>12} {:>14.2} {:>14.0}", median * 1e6, bytes as f64 / median / 1e6))?;
        }
    }
    all.barrier();
    Ok(())
}

impl Arguments {
    /// Returns the sizes of messages: 0, and the powers of two.
    fn sizes(&self) -> impl Iterator<Item = usize> {
        let powers = (0..usize::BITS).map(|power| 1 << power);
        std::iter::once(0).chain(powers).take_while(|bytes| *bytes <= self.largest)
    }
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.common
    }
}

fn main() -> ExitCode {
    phalanx::app::main(run)
}
