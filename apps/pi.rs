//! π by a reduction: the smallest complete program, and the place to start reading.
//!
//! ```text
//! pi                                   one rank, a million terms
//! mpiexec -n 4 pi --terms 1000000000   a quarter of the terms on each rank
//! mpiexec -n 4 pi --terms ranks        one term per rank: 2.895238
//! ```
//!
//! arctan 1 = 1 − 1/3 + 1/5 − …: each rank sums its shard of the terms, and `MPI_Reduce` adds these
//! sums on rank 0. Four times the total is π, up to the terms left out, which make about 1/terms. A
//! rank adds its terms from the smallest to the largest, so that rounding does not show.

use std::process::ExitCode;
use std::str::FromStr;

use clap::Parser;
use phalanx::app::{CommonOptions, Program, print_line};
use phalanx::comm::{Operation, World, shard};
use phalanx::{Error, Result};

/// Compute π: spread the terms of a series over the ranks and add their sums with MPI_Reduce.
#[derive(Parser)]
#[command(name = "pi", version, args_override_self = true)]
struct Arguments {
    /// Number of terms of the series, from 1 to 10^15, or "ranks" for one on each rank
    #[arg(long, value_name = "N", default_value = "1000000")]
    terms: Terms,

    #[command(flatten)]
    common: CommonOptions,
}

#[derive(Clone, Copy)]
enum Terms {
    Number(usize),
    Ranks,
}

impl FromStr for Terms {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Terms, String> {
        match text.parse() {
            Ok(number @ 1..=1_000_000_000_000_000) => Ok(Terms::Number(number)),
            _ if text == "ranks" => Ok(Terms::Ranks),
            _ => Err("expected a number from 1 to 10^15, or ranks".into()),
        }
    }
}

fn term(n: usize) -> f64 {
    let sign = if n.is_multiple_of(2) { 1.0 } else { -1.0 };
    sign / (2 * n + 1) as f64
}

fn run(world: &World, arguments: &Arguments) -> Result<()> {
    let num_terms = match arguments.terms {
        Terms::Number(number) => number,
        Terms::Ranks => world.size(),
    };
    let own: f64 = shard(num_terms, world.rank(), world.size()).rev().map(term).sum();
    let mut sum = [0.0];
    world.communicator().reduce(&[own], &mut sum, Operation::Sum, 0)?;
    if world.is_root() {
        let pi = 4.0 * sum[0];
        let off = (pi - std::f64::consts::PI).abs();
        print_line(&format!(
            "pi = {pi:.15} from {num_terms} terms on {} ranks, off by {off:.1e}",
            world.size()
        ))?;
        let first_left_out = 4.0 * term(num_terms).abs();
        if off > first_left_out {
            let why =
                format!("the sum is off by {off:e}, more than the first term left out, {first_left_out:e}");
            return Err(Error::failed("summing the series", why));
        }
    }
    Ok(())
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.common
    }
}

fn main() -> ExitCode {
    phalanx::app::main(run)
}
