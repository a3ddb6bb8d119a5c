//! Cross-entropy with some of the classes.

use phalanx::device::{Cuda, LossShape, logit_statistics, totals};
use phalanx::sums::{Leaves, Section};

use super::comparison::{compare, exact, given, output, random};
use super::operations::{DividedCrossEntropy, LogitStatistics};

/// Some of the classes, with the statistics of three ranks: before them, of them and after them. Of two
/// equal maxima, on two ranks, the first counts.
pub fn divided_losses(cuda: &Cuda, tolerance: f32) {
    for (rows, classes, num_leaves, rank) in [(1, 16, 3, 0), (37, 100, 3, 1), (129, 61, 3, 2), (5, 20, 1, 1)]
    {
        let own = Section::of_rank(Leaves { len: classes, num: num_leaves }, rank, 3);
        let (columns, first) = (own.len(), own.terms().start);
        let shape = LossShape { rows, columns, scale: 1.0 / rows as f32, classes: own };
        let what = format!("{shape:?}");
        let logits: Vec<f32> = random(rows * columns, 1).into_iter().map(|x| 8.0 * x).collect();
        let labels: Vec<f32> = (0..rows).map(|row| (row * row % classes) as f32).collect();
        let none = exact(vec![f32::NAN; logit_statistics::LEN * rows]);
        let arrays = [given(logits.clone()), exact(labels.clone()), none];
        compare(&what, cuda, tolerance, &arrays, &LogitStatistics { num_read: 2, shape });
        if num_leaves < 3 {
            continue;
        }
        let statistics = (0..3).flat_map(|part: usize| {
            let largest = (0..rows).map(move |row| if part == row % 2 { 7.5 } else { 8.0 });
            let best = (0..rows)
                .map(move |row| if part == rank { (first + row % columns) as f32 } else { part as f32 });
            let of_label = (0..rows).map(move |row| if part == row % 3 { 1.25 } else { 0.0 });
            largest.chain(best).chain(of_label)
        });
        let exponentials = random(rows, 5).into_iter().map(|x| 3.0 + x).collect();
        let arrays = [
            given(logits),
            exact(labels),
            exact(statistics.collect()),
            exact(exponentials),
            exact(vec![f32::NAN; rows]),
            output(rows * columns),
            exact(vec![f32::NAN; totals::NUM_VALUES]),
        ];
        compare(&what, cuda, tolerance, &arrays, &DividedCrossEntropy { num_read: 4, shape });
    }
}
