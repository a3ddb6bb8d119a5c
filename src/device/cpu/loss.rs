//! Losses with their gradients.

use smallvec::SmallVec;

use super::{Cpu, math};
use crate::device::logit_statistics::{BEST, LARGEST, LEN, OF_LABEL};
use crate::device::{CrossEntropyOperands, LossOperations, LossShape, totals};
use crate::sums::{MOST_PENDING, Step};

/// The logits of a row over all classes, as the loss needs them.
struct RowOfLogits {
    largest: f32,
    /// The class of the largest logit.
    best: usize,
    of_label: f32,
}

/// The losses of rows and the number of correct predictions.
#[derive(Default)]
struct Predictions {
    loss: f64,
    num_correct: usize,
}

impl LossOperations for Cpu {
    fn cross_entropy(
        &self,
        shape: &LossShape,
        logits: &[f32],
        labels: &[f32],
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let steps: ClassSteps = shape.classes.steps().collect();
        let mut predictions = Predictions::default();
        self.vectorised(
            #[inline(always)]
            || {
                let rows = logits.chunks_exact(shape.columns).zip(gradient.chunks_exact_mut(shape.columns));
                for ((logits, gradient), &label) in rows.zip(labels) {
                    let (best, label) = (first_largest(logits), label as usize);
                    let row = RowOfLogits { largest: logits[best], best, of_label: logits[label] };
                    exponentials(logits, row.largest, gradient);
                    let mut stack = [0.0; MOST_PENDING];
                    add_up(&steps, gradient, &mut stack);
                    predictions.add(&row, label, stack[0]);
                    finish_row(shape, label, stack[0], gradient);
                }
            },
        );
        predictions.add_to(sums);
    }

    fn find_logit_statistics(
        &self,
        shape: &LossShape,
        logits: &[f32],
        labels: &[f32],
        statistics: &mut [f32],
    ) {
        let LossShape { rows, columns, classes, .. } = *shape;
        let own = classes.terms();
        for (row, &label) in labels[..rows].iter().enumerate() {
            let logits = &logits[row * columns..(row + 1) * columns];
            let of_label = (label as usize).checked_sub(own.start).and_then(|at| logits.get(at));
            let largest = (columns > 0).then(|| first_largest(logits));
            statistics[LARGEST * rows + row] = largest.map_or(f32::NEG_INFINITY, |at| logits[at]);
            statistics[BEST * rows + row] = (own.start + largest.unwrap_or_default()) as f32;
            statistics[OF_LABEL * rows + row] = of_label.copied().unwrap_or_default();
        }
    }

    fn sum_exponentials(
        &self,
        shape: &LossShape,
        logits: &[f32],
        statistics: &[f32],
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let LossShape { rows, columns, classes, .. } = *shape;
        let steps: ClassSteps = classes.steps().collect();
        self.vectorised(
            #[inline(always)]
            || {
                for row in 0..rows {
                    let own = row * columns..(row + 1) * columns;
                    let gradient = &mut gradient[own.clone()];
                    exponentials(&logits[own], RowOfLogits::of_all(statistics, rows, row).largest, gradient);
                    let mut stack = [0.0; MOST_PENDING];
                    let depth = add_up(&steps, gradient, &mut stack);
                    (0..depth).for_each(|subtree| sums[subtree * rows + row] = stack[subtree]);
                }
            },
        );
    }

    fn finish_cross_entropy(
        &self,
        shape: &LossShape,
        operands: &CrossEntropyOperands<&[f32]>,
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let LossShape { rows, columns, .. } = *shape;
        let CrossEntropyOperands { labels, statistics, exponentials, .. } = *operands;
        let mut predictions = Predictions::default();
        self.vectorised(
            #[inline(always)]
            || {
                for row in 0..rows {
                    let (label, sum) = (labels[row] as usize, exponentials[row]);
                    predictions.add(&RowOfLogits::of_all(statistics, rows, row), label, sum);
                    finish_row(shape, label, sum, &mut gradient[row * columns..(row + 1) * columns]);
                }
            },
        );
        predictions.add_to(sums);
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        output: &[f32],
        targets: Option<&[f32]>,
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let factor = 2.0 * shape.scale / shape.columns as f32;
        match targets {
            Some(targets) => gradient.iter_mut().zip(output).zip(targets).for_each(|((g, o), t)| *g = o - t),
            None => gradient.copy_from_slice(output),
        }
        sums[totals::LOSS] += (self.squares(gradient) / shape.columns as f64) as f32;
        self.map(gradient, |difference| difference * factor);
    }
}

impl RowOfLogits {
    /// Returns a row from the statistics of all ranks.
    #[inline(always)]
    fn of_all(statistics: &[f32], rows: usize, row: usize) -> RowOfLogits {
        let mut all = RowOfLogits { largest: f32::NEG_INFINITY, best: 0, of_label: 0.0 };
        for (rank, part) in statistics.chunks_exact(LEN * rows).enumerate() {
            let at = |which: usize| part[which * rows + row];
            if rank == 0 || at(LARGEST) > all.largest {
                (all.largest, all.best) = (at(LARGEST), at(BEST) as usize);
            }
            // all terms but one are 0
            all.of_label += at(OF_LABEL);
        }
        all
    }
}

impl Predictions {
    /// Adds that of a row whose exponentials have the sum `exponentials`.
    #[inline(always)]
    fn add(&mut self, row: &RowOfLogits, label: usize, exponentials: f32) {
        // the logarithm of the C library has other bits on other machines
        self.loss += f64::from(libm::logf(exponentials) + (row.largest - row.of_label));
        self.num_correct += usize::from(row.best == label);
    }

    fn add_to(self, sums: &mut [f32]) {
        sums[totals::LOSS] += self.loss as f32;
        sums[totals::CORRECT] += self.num_correct as f32;
    }
}

/// The lanes in which the largest logit is searched for: the widest vector registers.
const LANES: usize = 16;

/// Returns the place of the first of the largest logits, of which there is one.
#[inline(always)]
fn first_largest(logits: &[f32]) -> usize {
    let larger = |one: f32, other: f32| if other > one { other } else { one };
    let (blocks, rest) = logits.as_chunks::<LANES>();
    let mut largest = rest.iter().copied().fold(logits[0], larger);
    if !blocks.is_empty() {
        let mut lanes = [largest; LANES];
        for block in blocks {
            lanes.iter_mut().zip(block).for_each(|(lane, logit)| *lane = larger(*lane, *logit));
        }
        largest = lanes.into_iter().fold(largest, larger);
    }
    // if the first is NaN, none is larger
    logits.iter().position(|logit| *logit == largest).unwrap_or_default()
}

/// Computes the exponentials of the distances of logits to the largest.
#[inline(always)]
fn exponentials(logits: &[f32], largest: f32, into: &mut [f32]) {
    into.iter_mut().zip(logits).for_each(|(into, logit)| *into = math::exp(logit - largest));
}

/// Turns the exponentials of a row's own classes into the gradient.
#[inline(always)]
fn finish_row(shape: &LossShape, label: usize, exponentials: f32, gradient: &mut [f32]) {
    let factor = shape.scale / exponentials;
    gradient.iter_mut().for_each(|g| *g *= factor);
    let at = label.checked_sub(shape.classes.terms().start);
    if let Some(of_label) = at.and_then(|at| gradient.get_mut(at)) {
        *of_label -= shape.scale;
    }
}

/// The leaves of the sum over classes.
type ClassSteps = SmallVec<[Step; 32]>;

/// The number of leaves that are added up side by side, because an addition waits for the one before it.
const SIDE_BY_SIDE: usize = 4;

/// Adds up leaves of `values`. Returns the number of whole subtrees, whose sums are on the `stack` then.
#[inline(always)]
fn add_up(steps: &[Step], values: &[f32], stack: &mut [f32; MOST_PENDING]) -> usize {
    if let [_] = steps {
        stack[0] = values.iter().fold(0.0, |sum, value| sum + value);
        return 1;
    }
    let mut depth = 0;
    for some in steps.chunks(SIDE_BY_SIDE) {
        let mut leaves: [&[f32]; SIDE_BY_SIDE] = [&[]; SIDE_BY_SIDE];
        leaves.iter_mut().zip(some).for_each(|(leaf, step)| *leaf = &values[step.first..step.end]);
        for (step, mut sum) in some.iter().zip(chains(&leaves)) {
            for _ in 0..step.num_merges {
                depth -= 1;
                sum += stack[depth];
            }
            stack[depth] = sum;
            depth += 1;
        }
    }
    depth
}

/// Returns the sums of leaves, each in the order of its terms.
#[inline(always)]
fn chains(leaves: &[&[f32]; SIDE_BY_SIDE]) -> [f32; SIDE_BY_SIDE] {
    let mut sums = [0.0; SIDE_BY_SIDE];
    let common = leaves.iter().map(|leaf| leaf.len()).min().unwrap_or_default();
    let [first, second, third, fourth] = leaves.map(|leaf| leaf[..common].iter());
    for (((a, b), c), d) in first.zip(second).zip(third).zip(fourth) {
        sums = [sums[0] + a, sums[1] + b, sums[2] + c, sums[3] + d];
    }
    for (sum, leaf) in sums.iter_mut().zip(leaves) {
        leaf[common..].iter().for_each(|value| *sum += value);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::{Leaves, Section, Subtrees};

    /// Returns the gradient, by rows, and the totals of a loss whose classes `num_ranks` ranks share.
    fn divided(leaves: Leaves, num_ranks: usize, logits: &[f32], labels: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (cpu, rows, num) = (Cpu::new(1).unwrap(), labels.len(), leaves.len);
        let sections: Vec<Section> =
            (0..num_ranks).map(|rank| Section::of_rank(leaves, rank, num_ranks)).collect();
        let own = |section: Section| -> Vec<f32> {
            logits.chunks(num).flat_map(|row| &row[section.terms()]).copied().collect()
        };
        let shape = |classes: Section| LossShape { rows, columns: classes.len(), scale: 0.25, classes };
        let mut statistics = vec![f32::NAN; num_ranks * LEN * rows];
        for (section, part) in sections.iter().zip(statistics.chunks_mut(LEN * rows)) {
            cpu.find_logit_statistics(&shape(*section), &own(*section), labels, part);
        }
        // what ranks have is merged as a reduction does it
        let mut merges = Subtrees::new(leaves.num, num_ranks).merges().into_iter();
        let mut stack: Vec<Vec<f32>> = Vec::new();
        let mut gradients: Vec<Vec<f32>> = Vec::new();
        for section in &sections {
            let mut subtrees = vec![f32::NAN; section.depth_after() * rows];
            let mut gradient = vec![f32::NAN; rows * section.len()];
            let logits = own(*section);
            cpu.sum_exponentials(&shape(*section), &logits, &statistics, &mut gradient, &mut subtrees);
            gradients.push(gradient);
            for subtree in subtrees.chunks(rows) {
                let mut sum = subtree.to_vec();
                for _ in 0..merges.next().unwrap() {
                    sum.iter_mut().zip(stack.pop().unwrap()).for_each(|(sum, term)| *sum += term);
                }
                stack.push(sum);
            }
        }
        assert_eq!(stack.len(), 1);
        let mut all = vec![0.0; rows * num];
        let mut totals = Vec::new();
        for (section, mut gradient) in sections.iter().zip(gradients) {
            let (logits, statistics, exponentials) = (&own(*section)[..], &statistics[..], &stack[0][..]);
            let operands = CrossEntropyOperands { logits, labels, statistics, exponentials };
            let mut sums = vec![0.5; totals::LEN];
            cpu.finish_cross_entropy(&shape(*section), &operands, &mut gradient, &mut sums);
            for row in 0..rows {
                let own = section.terms();
                all[row * num..][own].copy_from_slice(&gradient[row * section.len()..][..section.len()]);
            }
            assert!(totals.is_empty() || totals == sums, "all ranks have the loss");
            totals = sums;
        }
        (all, totals)
    }

    #[test]
    fn divided_classes_have_the_bits_of_whole_ones() {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        for len in [1, 2, 7, 16, 37, 301] {
            let rows = 11;
            let mut logits: Vec<f32> = (0..rows * len).map(|at| (at as f32 * 0.7).sin() * 9.0).collect();
            // the first of equal ones counts, wherever it is
            logits[2 * len..3 * len].fill(1.5);
            logits[3 * len..][len / 2..len].fill(30.0);
            let labels: Vec<f32> = (0..rows).map(|row| (row * row % len) as f32).collect();
            for num in [1, 2, 3, 8, 50] {
                let leaves = Leaves { len, num };
                let shape =
                    LossShape { classes: Section::whole(leaves), ..LossShape::whole(rows, len, 0.25) };
                let (mut gradient, mut sums) = (vec![f32::NAN; rows * len], vec![0.5; totals::LEN]);
                let cpu = Cpu::new(1).unwrap();
                cpu.cross_entropy(&shape, &logits, &labels, &mut gradient, &mut sums);
                let whole = [bits(gradient), bits(sums)];
                for num_ranks in [1, 2, 3, 4, 8, 9] {
                    let (gradient, sums) = divided(leaves, num_ranks, &logits, &labels);
                    assert_eq!([bits(gradient), bits(sums)], whole, "{leaves:?} on {num_ranks} ranks");
                }
            }
        }
    }
}
