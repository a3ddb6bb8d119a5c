//! The rotation of queries and keys by angles that grow with the position.

use std::cell::RefCell;

use super::Cpu;
use crate::device::{AttentionShape, Rotation};

thread_local! {
    static ANGLES: RefCell<Angles> = RefCell::default();
}

/// The cosines and sines of the angles by which vectors are rotated.
#[derive(Default)]
struct Angles {
    /// The length of a vector, and the base.
    of: (usize, f32),
    /// For each position from 0 on the cosines, then the sines.
    table: Vec<f32>,
}

impl Angles {
    /// Computes what is missing of the table for `positions`. The functions of `libm` have the same bits on
    /// every machine.
    fn prepare(&mut self, positions: usize, width: usize, base: f32) {
        if self.of != (width, base) {
            self.of = (width, base);
            self.table.clear();
        }
        for position in self.table.len() / width..positions {
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
    pub(super) fn rotate_in_place(&self, shape: &AttentionShape, rotation: Rotation, values: &mut [f32]) {
        let AttentionShape { positions, heads, width, .. } = *shape;
        let Rotation { base, first, inverse } = rotation;
        ANGLES.with_borrow_mut(|angles| {
            angles.prepare(first + positions, width, base);
            let table = &angles.table[first * width..];
            let sequences = values.chunks_exact_mut(positions * shape.input_width());
            self.for_each(sequences, |sequence| {
                let positions = sequence.chunks_exact_mut(shape.input_width());
                for (values, angles) in positions.zip(table.chunks_exact(width)) {
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
