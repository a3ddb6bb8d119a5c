//! Losses of whole rows, and of classes that ranks share.

use phalanx::device::{
    Activation, CrossEntropyOperands, Cuda, Device, LossOutputs, LossShape, Role, StepTotals,
    logit_statistics, totals,
};
use phalanx::sums::{Leaves, Section};

use super::comparison::{compare, exact, given, output, random};
use super::operations::Operation;

operation!(CrossEntropy { shape: LossShape }, |this, device, views, outs| {
    with_totals(device, outs[1].take().unwrap(), |sums| {
        device.cross_entropy(&this.shape, views[0], views[1], outs[0].take().unwrap(), sums);
    })
});
operation!(LogitStatistics { shape: LossShape }, |this, device, views, outs| {
    device.find_logit_statistics(&this.shape, views[0], views[1], outs[0].take().unwrap())
});
operation!(DividedCrossEntropy { shape: LossShape }, |this, device, views, outs| {
    let &[logits, labels, statistics, exponentials] = &views[..] else { panic!("there are four") };
    let LossShape { rows, columns, .. } = this.shape;
    let mut gradient = device.allocate(rows * columns, Role::Activations).unwrap();
    let view = device.view_mut(&mut gradient, 0..rows * columns);
    device.sum_exponentials(&this.shape, logits, statistics, view, outs[0].take().unwrap());
    let operands = CrossEntropyOperands { logits, labels, statistics, exponentials };
    let view = device.view_mut(&mut gradient, 0..rows * columns);
    with_totals(device, outs[2].take().unwrap(), |sums| {
        device.finish_cross_entropy(&this.shape, &operands, view, sums);
    });
    device.copy(device.view(&gradient, 0..rows * columns), outs[1].take().unwrap());
});
operation!(
    SquaredError { shape: LossShape, targets: bool, activation: Activation },
    |this, device, views, outs| {
        let targets = this.targets.then(|| views[1]);
        let len = this.shape.rows * this.shape.columns;
        let [mut output, mut saved] = [(); 2].map(|()| device.allocate(len, Role::Activations).unwrap());
        let (to_save, to_output) =
            (device.view_mut(&mut saved, 0..len), device.view_mut(&mut output, 0..len));
        device.activation_forward(this.activation, views[0], to_save, to_output);
        let values = device.view(&output, 0..len);
        let saved = if this.activation.saves() { device.view(&saved, 0..len) } else { values };
        let has_activation = this.activation != Activation::Identity;
        let outputs = LossOutputs { values, activation: has_activation.then_some((this.activation, saved)) };
        with_totals(device, outs[1].take().unwrap(), |sums| {
            device.mean_squared_error(&this.shape, outputs, targets, outs[0].take().unwrap(), sums);
        })
    }
);

/// Runs a loss on totals that are not 0, and writes those after it to `into`.
fn with_totals<D: Device>(device: &D, into: D::ViewMut<'_>, evaluate: impl FnOnce(D::ViewMut<'_>)) {
    let mut sums = device.allocate(totals::LEN, Role::Exact).unwrap();
    write(device, device.view_mut(&mut sums, 0..totals::NUM_VALUES), [0.25; totals::NUM_VALUES]);
    evaluate(device.view_mut(&mut sums, 0..totals::LEN));
    let reading = device.take_totals(device.view_mut(&mut sums, 0..totals::LEN)).unwrap();
    let StepTotals { loss, correct, gradient_squares } = device.finish_totals(reading).unwrap();
    write(device, into, [loss.value(), correct, gradient_squares].map(|total| total as f32));
}

fn write<D: Device>(device: &D, into: D::ViewMut<'_>, values: [f32; totals::NUM_VALUES]) {
    let mut fill = |memory: &mut [f32]| {
        memory.copy_from_slice(&values);
        Ok(())
    };
    device.write(into, &mut fill).unwrap();
}

/// Losses of whole rows.
pub fn losses(cuda: &Cuda, tolerance: f32) {
    for (rows, columns) in [(1, 1), (1, 2), (5, 10), (128, 10), (129, 3), (300, 100)] {
        let shape = LossShape::whole(rows, columns, 1.0 / rows as f32);
        let mut logits: Vec<f32> = random(rows * columns, 1).into_iter().map(|x| 8.0 * x).collect();
        // of two equal maxima the first counts
        if columns > 2 {
            (logits[1], logits[2]) = (9.0, 9.0);
        }
        let labels = (0..rows).map(|row| if row == 0 { 0 } else { row % columns } as f32).collect();
        let sums = exact(vec![f32::NAN; totals::NUM_VALUES]);
        let arrays = [given(logits), exact(labels), output(rows * columns), sums.clone()];
        compare(&format!("{shape:?}"), cuda, tolerance, &arrays, &CrossEntropy { num_read: 2, shape });
        use Activation::{Gelu, GeluTanh, Identity, Relu, Silu, Tanh};
        for activation in [Identity, Relu, Gelu, GeluTanh, Silu, Tanh] {
            for targets in [true, false] {
                let [outputs, goals] = [2, 3].map(|seed| random(rows * columns, seed));
                let arrays = [given(outputs), exact(goals), output(rows * columns), sums.clone()];
                let error = SquaredError { num_read: 2, shape, targets, activation };
                compare(&format!("{shape:?} {activation:?}"), cuda, tolerance, &arrays, &error);
            }
        }
    }
}

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
