//! One operation, done in several ways in turns.

use super::overlap::{Computation, overlap};
use super::timing::time;
use super::{Form, Meanwhile, Measured, Other, Row, Subject};
use crate::Result;
use crate::comm::{Algorithm, Choice, Communicator, Operation, library_version};

/// A way to do the operation.
pub(super) struct Contender<'a> {
    /// What it is called beside the others; the first is called by its algorithm.
    pub name: &'static str,
    /// How it is done, if not as was measured to be fast.
    pub choice: Option<Choice>,
    /// The operation on its buffers.
    pub subject: Box<dyn Subject + 'a>,
}

impl Subject for Contender<'_> {
    fn fill(&mut self) -> Result<()> {
        self.subject.fill()
    }

    fn choose(&mut self, choice: Option<Choice>) {
        self.choice = choice;
    }

    fn algorithm(&self) -> Algorithm {
        self.subject.algorithm()
    }

    fn run(&mut self, meanwhile: Meanwhile<'_>) -> Result<()> {
        self.subject.choose(self.choice);
        self.subject.run(meanwhile)
    }

    fn wrong(&mut self) -> Result<u64> {
        self.subject.wrong()
    }
}

/// Measures the first of `contenders`, on `bytes` in `memory`, beside the others, each for about `seconds`, and how much of it `computation`
/// hides. Collective.
///
/// # Errors
/// There is no memory for messages.
pub(super) fn contest(
    all: &Communicator,
    (operation, form): (Measured, Form),
    (bytes, memory): (usize, &'static str),
    seconds: f64,
    computation: &dyn Computation,
    mut contenders: Vec<Contender<'_>>,
) -> Result<Row> {
    let mut wrong = [0_i64];
    for contender in &mut contenders {
        // memory that was never written is no memory to measure with
        contender.fill()?;
        contender.run(&mut |_| Ok(()))?;
        wrong[0] += contender.wrong()? as i64;
    }
    let algorithm = contenders[0].algorithm();
    all.all_reduce(&mut wrong, Operation::Sum)?;
    let mut subjects: Vec<&mut dyn Subject> =
        contenders.iter_mut().map(|one| one as &mut dyn Subject).collect();
    let times = time(all, seconds, &mut subjects)?;
    let median = times[0].median();
    let overlap_percent =
        if form.is_blocking { None } else { Some(overlap(all, &mut contenders[0], computation, median)?) };
    let others = times[1..].iter().zip(&contenders[1..]).map(|(times, contender)| Other {
        algorithm: contender.name.to_owned(),
        median_us: times.median() * 1e6,
        ratio: times.median() / median,
    });
    let bandwidth = bytes as f64 / median / 1e9;
    let (call, place) = form.words();
    let chunk_bytes = contenders[0].choice.map(|choice| choice.chunk).filter(|chunk| *chunk < usize::MAX);
    Ok(Row {
        operation: operation.name(),
        ranks: all.size(),
        nodes: all.num_nodes(),
        mpi: library_version(),
        bytes,
        memory,
        call,
        place,
        algorithm: algorithm.to_string(),
        chunk_bytes,
        median_us: median * 1e6,
        min_us: times[0].min() * 1e6,
        p99_us: times[0].p99() * 1e6,
        algorithm_gbs: bandwidth,
        bus_gbs: bandwidth * operation.bus_factor(all.size()),
        wrong: wrong[0] as u64,
        overlap_percent,
        others: others.collect(),
    })
}
