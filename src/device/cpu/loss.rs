//! Losses with their gradients: rows are split among the threads.

use std::cell::RefCell;
use std::ops::Range;

use super::Cpu;
use super::loops::{CHUNK, sum_of_squares};
use super::softmax::{ClassSteps, RowOfLogits, add_up, exponentials, finish_row, first_largest};
use crate::device::logit_statistics::{BEST, LARGEST, LEN, OF_LABEL};
use crate::device::{
    ActivationOperations, BiasShape, CrossEntropyOperands, LossOperations, LossOutputs, LossShape, totals,
};
use crate::sums::{ExactSum, MOST_PENDING};

thread_local! {
    /// The losses of rows, and 1 for each correct prediction.
    static PREDICTIONS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
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
        self.predictions(
            shape,
            gradient,
            sums,
            #[inline(always)]
            |row, gradient| {
                let (logits, label) = (&logits[row * shape.columns..][..shape.columns], labels[row] as usize);
                let best = first_largest(logits);
                let found = RowOfLogits { largest: logits[best], best, of_label: logits[label] };
                exponentials(logits, found.largest, gradient);
                let mut stack = [0.0; MOST_PENDING];
                add_up(&steps, gradient, &mut stack);
                finish_row(shape, label, stack[0], gradient);
                found.prediction(label, stack[0])
            },
        );
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
        let mut parts = statistics.chunks_exact_mut(rows);
        let parts: [&mut [f32]; LEN] = std::array::from_fn(|_| parts.next().unwrap_or_default());
        self.split_rows(
            rows,
            0,
            &mut [],
            parts,
            #[inline(always)]
            |range, _, parts| {
                for (at, row) in range.enumerate() {
                    let logits = &logits[row * columns..][..columns];
                    let of_label =
                        (labels[row] as usize).checked_sub(own.start).and_then(|at| logits.get(at));
                    let best = (columns > 0).then(|| first_largest(logits));
                    parts[LARGEST][at] = best.map_or(f32::NEG_INFINITY, |best| logits[best]);
                    parts[BEST][at] = (own.start + best.unwrap_or_default()) as f32;
                    parts[OF_LABEL][at] = of_label.copied().unwrap_or_default();
                }
            },
        );
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
        let mut subtrees = sums.chunks_exact_mut(rows);
        let subtrees: [&mut [f32]; MOST_PENDING] =
            std::array::from_fn(|_| subtrees.next().unwrap_or_default());
        self.split_rows(
            rows,
            columns,
            gradient,
            subtrees,
            #[inline(always)]
            |range, gradient, mut subtrees| {
                for (at, row) in range.enumerate() {
                    let (logits, into) = (&logits[row * columns..][..columns], &mut gradient[at * columns..]);
                    let into = &mut into[..columns];
                    exponentials(logits, RowOfLogits::of_all(statistics, rows, row).largest, into);
                    let mut stack = [0.0; MOST_PENDING];
                    let depth = add_up(&steps, into, &mut stack);
                    subtrees[..depth].iter_mut().zip(stack).for_each(|(subtree, sum)| subtree[at] = sum);
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
        let CrossEntropyOperands { labels, statistics, exponentials, .. } = *operands;
        self.predictions(
            shape,
            gradient,
            sums,
            #[inline(always)]
            |row, gradient| {
                let (label, sum) = (labels[row] as usize, exponentials[row]);
                finish_row(shape, label, sum, gradient);
                RowOfLogits::of_all(statistics, shape.rows, row).prediction(label, sum)
            },
        );
    }

    fn mean_squared_error(
        &self,
        shape: &LossShape,
        outputs: LossOutputs<&[f32]>,
        targets: Option<&[f32]>,
        gradient: &mut [f32],
        sums: &mut [f32],
    ) {
        let LossShape { rows, columns, scale, .. } = *shape;
        let factor = 2.0 * scale / columns as f32;
        PREDICTIONS.with_borrow_mut(|losses| {
            losses.resize(rows, 0.0);
            self.split_rows(
                rows,
                columns,
                gradient,
                [losses],
                #[inline(always)]
                |range, gradient, [losses]| {
                    for (at, row) in range.enumerate() {
                        let gradient = &mut gradient[at * columns..][..columns];
                        let output = &outputs.values[row * columns..][..columns];
                        match targets.map(|targets| &targets[row * columns..][..columns]) {
                            Some(targets) => {
                                let values = gradient.iter_mut().zip(output).zip(targets);
                                values.for_each(|((gradient, output), target)| *gradient = output - target);
                            }
                            None => gradient.copy_from_slice(output),
                        }
                        let squares: f64 = match columns {
                            // without lanes
                            1 => f64::from(gradient[0]) * f64::from(gradient[0]),
                            _ => gradient.chunks(CHUNK).map(sum_of_squares).sum(),
                        };
                        losses[at] = (squares / columns as f64) as f32;
                        gradient.iter_mut().for_each(|difference| *difference *= factor);
                    }
                },
            );
            add_losses(losses, sums);
        });
        if let Some((activation, saved)) = outputs.activation {
            self.activation_backward(activation, BiasShape { columns, positions: 1 }, saved, gradient, None);
        }
    }
}

impl Cpu {
    /// Runs `work` on the rows of each thread, with their gradients and their elements of arrays of one
    /// value for each row, of which some may be empty.
    #[inline(always)]
    fn split_rows<const N: usize>(
        &self,
        rows: usize,
        columns: usize,
        mut gradient: &mut [f32],
        mut arrays: [&mut [f32]; N],
        work: impl Fn(Range<usize>, &mut [f32], [&mut [f32]; N]) + Sync,
    ) {
        let part = self.rows_per_thread(rows);
        let parts = (0..rows).step_by(part).map(|first| {
            let range = first..rows.min(first + part);
            let own =
                gradient.split_off_mut(..range.len() * columns).expect("there is a gradient of each row");
            let arrays = arrays.each_mut().map(|rest| {
                let len = rest.len().min(range.len());
                rest.split_off_mut(..len).expect("the length is at most all")
            });
            (range, own, arrays)
        });
        self.for_each(parts, |(range, own, mut arrays)| {
            self.vectorised(
                #[inline(always)]
                || work(range.clone(), own, arrays.each_mut().map(|array| &mut **array)),
            );
        });
    }

    /// Runs `work` on each row and its gradient, and adds the losses and the correct predictions, which it
    /// returns, to `sums` in the order of the rows.
    #[inline(always)]
    fn predictions(
        &self,
        shape: &LossShape,
        gradient: &mut [f32],
        sums: &mut [f32],
        work: impl Fn(usize, &mut [f32]) -> [f32; 2] + Sync,
    ) {
        let LossShape { rows, columns, .. } = *shape;
        PREDICTIONS.with_borrow_mut(|found| {
            found.resize(2 * rows, 0.0);
            let (losses, correct) = found.split_at_mut(rows);
            self.split_rows(
                rows,
                columns,
                gradient,
                [losses, correct],
                #[inline(always)]
                |range, gradient, arrays| {
                    let [losses, correct] = arrays;
                    for (at, row) in range.enumerate() {
                        let gradient = &mut gradient[at * columns..][..columns];
                        [losses[at], correct[at]] = work(row, gradient);
                    }
                },
            );
            let (losses, correct) = found.split_at(rows);
            add_losses(losses, sums);
            sums[totals::CORRECT] += correct.iter().sum::<f32>();
        });
    }
}

/// Adds the losses of rows to the exact sum in a step's totals, so that the loss of a batch does not depend
/// on the layout.
fn add_losses(losses: &[f32], sums: &mut [f32]) {
    let words = bytemuck::cast_slice_mut(&mut sums[totals::EXACT_LOSS]);
    let mut sum: ExactSum = bytemuck::pod_read_unaligned(words);
    losses.iter().for_each(|loss| sum.add(f64::from(*loss)));
    words.copy_from_slice(bytemuck::bytes_of(&sum));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sums::{Leaves, Section, Subtrees};

    /// Returns the gradient, by rows, and the totals of a loss whose classes `num_ranks` ranks share.
    fn divided(leaves: Leaves, num_ranks: usize, logits: &[f32], labels: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (cpu, rows, num) = (Cpu::new(1 + num_ranks % 3).unwrap(), labels.len(), leaves.len);
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
            let mut sums = vec![0.0; totals::LEN];
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
                let (mut gradient, mut sums) = (vec![f32::NAN; rows * len], vec![0.0; totals::LEN]);
                let cpu = Cpu::new(1 + num % 4).unwrap();
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
