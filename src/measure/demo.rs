//! Drawings of collective operations with the values of every rank, as in teaching material.

use std::ops::Range;

use super::buffers::Geometry;
use super::{CallForm, HostSubject, OPERATIONS, Subject};
use crate::Result;
use crate::comm::Communicator;

/// Prints, on rank 0, the values of every rank before and after each operation: element i of rank r
/// of N is `10·r + i`. Collective.
///
/// # Errors
/// There is no memory for messages, or stdout cannot be written.
pub fn demonstrate(all: &Communicator, print: &dyn Fn(&str) -> Result<()>) -> Result<()> {
    let size = all.size();
    let geometry = Geometry::new(all, size);
    for operation in OPERATIONS {
        let mut forms = CallForm::ALL.into_iter().filter(|form| form.is_blocking);
        let Some(form) = forms.find(|form| (operation.exists)(*form)) else { continue };
        let Some(mut subject) = HostSubject::new(all, operation, form, size)? else { continue };
        let before: Vec<f32> = (0..size).map(|at| (10 * all.rank() + at) as f32).collect();
        subject.fill_with(&|at| before[at]);
        subject.run(None, &mut |_| Ok(()))?;
        let before = table(all, &before, (operation.sent)(&geometry))?;
        let after = table(all, subject.result(), (operation.received)(&geometry))?;
        if all.is_root() {
            print(&format!("{}: {}", operation.name, operation.description))?;
            for (rank, (before, after)) in before.iter().zip(&after).enumerate() {
                print(&format!("  rank {rank}  {before}   ->  {after}"))?;
            }
            print("")?;
        }
    }
    Ok(())
}

/// Formats the values of every rank, on rank 0; those that are not in `shown` become dots.
fn table(all: &Communicator, values: &[f32], shown: Range<usize>) -> Result<Vec<String>> {
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
