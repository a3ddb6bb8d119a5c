//! [`contest`]: measures one operation, done in several ways alternately.

use super::contender::Contender;
use super::overlap::{Computation, overlap};
use super::timing::time;
use super::{CallForm, Measured, Other, Row};
use crate::Result;
use crate::comm::{Communicator, Operation, library_version};

/// The conditions of a measurement.
pub(super) struct Conditions {
    /// The operation.
    pub operation: Measured,
    /// The form of the operation.
    pub form: CallForm,
    /// The size of the buffer.
    pub bytes: usize,
    /// `host` or `device`.
    pub memory: &'static str,
    /// The approximate time that each contender is measured, in seconds.
    pub seconds: f64,
}

/// Measures `contenders` alternately, and how much of the first one's time `computation` hides;
/// `None` if there are none. Collective.
///
/// # Errors
/// There is no memory for messages.
pub(super) fn contest(
    all: &Communicator,
    conditions: Conditions,
    computation: &dyn Computation,
    mut contenders: Vec<Contender<'_>>,
) -> Result<Option<Row>> {
    if contenders.is_empty() {
        return Ok(None);
    }
    let Conditions { operation, form, bytes, memory, seconds } = conditions;
    let (mut wrong, mut algorithms) = ([0_i64], Vec::new());
    for contender in &mut contenders {
        // this also touches every page before anything is timed
        contender.subject.fill()?;
        algorithms.push(contender.run(&mut |_| Ok(()))?);
        wrong[0] += contender.subject.wrong()? as i64;
    }
    all.all_reduce(&mut wrong, Operation::Sum)?;
    let times = time(all, seconds, &mut contenders)?;
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
    let followed = contenders[0].choice.filter(|choice| choice.algorithm == algorithms[0]);
    let chunk_bytes = followed.map(|choice| choice.chunk).filter(|chunk| *chunk < usize::MAX);
    Ok(Some(Row {
        operation: operation.name,
        ranks: all.size(),
        nodes: all.num_nodes(),
        mpi: library_version(),
        bytes,
        memory,
        call,
        place,
        algorithm: algorithms[0].to_string(),
        chunk_bytes,
        median_us: median * 1e6,
        min_us: times[0].min() * 1e6,
        p99_us: times[0].p99() * 1e6,
        algorithm_gbs: bandwidth,
        bus_gbs: bandwidth * (operation.bus_factor)(all.size()),
        wrong: wrong[0] as u64,
        overlap_percent,
        others: others.collect(),
    }))
}
