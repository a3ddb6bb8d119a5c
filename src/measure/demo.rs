//! What collective operations do, drawn with the values of every rank, as teaching material does.

use super::{Form, HostSubject, Measured, Subject};
use crate::Result;
use crate::comm::Communicator;

/// Prints, on rank 0, what every rank has before and after each operation: of rank r of N, `10·r + i` at place i. Collective.
///
/// # Errors
/// There is no memory for messages, or stdout cannot be written.
pub fn demonstrate(all: &Communicator, print: &dyn Fn(&str) -> Result<()>) -> Result<()> {
    let size = all.size();
    for operation in Measured::ALL {
        let form = Form {
            is_blocking: true,
            is_in_place: matches!(operation, Measured::Broadcast | Measured::AllReduce),
        };
        let Some(mut subject) = HostSubject::new(all, operation, form, size)? else { continue };
        let before: Vec<f32> = (0..size).map(|at| (10 * all.rank() + at) as f32).collect();
        subject.fill_with(&before);
        subject.run(&mut |_| Ok(()))?;
        let (sent, received) = operation.looked_at(all.rank(), size);
        let before = table(all, &before, sent)?;
        let after = table(all, subject.result(), received)?;
        if all.is_root() {
            print(&format!("{}: {}", operation.name(), operation.in_words()))?;
            for (rank, (before, after)) in before.iter().zip(&after).enumerate() {
                print(&format!("  rank {rank}  {before}   ->  {after}"))?;
            }
            print("")?;
        }
    }
    Ok(())
}

/// The values of every rank, on rank 0, as text: those that are not in `shown` as dots.
fn table(all: &Communicator, values: &[f32], shown: std::ops::Range<usize>) -> Result<Vec<String>> {
    let size = all.size();
    let mut own = values.to_vec();
    own.resize(size, f32::NAN);
    for (at, value) in own.iter_mut().enumerate() {
        *value = if shown.contains(&at) { *value } else { f32::NAN };
    }
    let mut every = vec![0.0; size * size];
    all.gather(&own, &mut every, 0)?;
    let text = |value: &f32| if value.is_nan() { format!("{:>4}", "·") } else { format!("{value:>4}") };
    Ok(every.chunks(size).map(|row| row.iter().map(text).collect()).collect())
}
