//! The rotation of queries and keys by angles that grow with the position.

use std::cell::RefCell;

use super::Cpu;
use crate::device::AttentionShape;

thread_local! {
    static ANGLES: RefCell<Angles> = RefCell::default();
}

/// The cosines and sines of the angles by which vectors are rotated.
#[derive(Default)]
struct Angles {
    /// The positions, the length of a vector and the base of the table.
    of: (usize, usize, f32),
    /// For each position the cosines, then the sines.
    table: Vec<f32>,
}

impl Angles {
    /// Computes the table, unless it is there. The functions of `libm` have the same bits on every machine.
    fn prepare(&mut self, positions: usize, width: usize, base: f32) {
        if self.of == (positions, width, base) {
            return;
        }
        self.of = (positions, width, base);
        self.table.clear();
        for position in 0..positions {
            let angles = (0..width / 2).map(|at| {
                let power = -2.0 * at as f64 / width as f64;
                position as f64 * libm::pow(f64::from(base), power)
            });
            self.table.extend(angles.clone().map(|angle| libm::cos(angle) as f32));
            self.table.extend(angles.map(|angle| libm::sin(angle) as f32));
        }
    }
}

impl Cpu {
    /// Rotates the queries and keys of `values`: see
    /// [`rotate`](crate::device::AttentionOperations::rotate).
    pub(super) fn rotate_in_place(
        &self,
        shape: &AttentionShape,
        base: f32,
        inverse: bool,
        values: &mut [f32],
    ) {
        let AttentionShape { positions, heads, width, .. } = *shape;
        ANGLES.with_borrow_mut(|angles| {
            angles.prepare(positions, width, base);
            let sequences = values.chunks_exact_mut(positions * shape.input_width());
            self.for_each(sequences, |sequence| {
                let positions = sequence.chunks_exact_mut(shape.input_width());
                for (values, angles) in positions.zip(angles.table.chunks_exact(width)) {
                    let (cosines, sines) = angles.split_at(width / 2);
                    for group in values.chunks_exact_mut(shape.group_width()) {
                        for vector in group.chunks_exact_mut(width).take(heads + 1) {
                            let (first, second) = vector.split_at_mut(width / 2);
                            let factors = cosines.iter().zip(sines);
                            for ((a, b), (cosine, sine)) in first.iter_mut().zip(second).zip(factors) {
                                let sine = if inverse { -sine } else { *sine };
                                (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
                            }
                        }
                    }
                }
            });
        });
    }
}
