//! The sharing of memory by gradients that are not there at the same time: pure logic.
//!
//! A backward pass goes from the last piece to the first. The gradient of a value is there from the pass of
//! the last piece that reads the value to that of the piece that gives it. After that, another gradient may
//! take its array. A few arrays then pass from piece to piece and stay in the caches, in place of an array
//! for each point. Registers are allocated in the same way: Poletto and Sarkar, "Linear scan register
//! allocation", 1999.

use std::cmp::Reverse;

use super::Stage;

/// The passes, counted from the last piece on, in which an array has a gradient.
#[derive(Debug, Clone, Copy)]
struct Life {
    first: usize,
    last: usize,
}

/// An array that several gradients may have, one after the other.
struct SharedArray {
    /// The most values of a row.
    width: usize,
    /// The last pass in which the array has a gradient; `usize::MAX` if it is not shared.
    last: usize,
}

impl Stage {
    /// Lets gradients share arrays. Those at both ends of the stage, which may be in messages, and that of
    /// transient points keep arrays of their own. Only for passes that compute the gradients of weights
    /// together with those of values: [`Pass::Whole`](super::Pass::Whole).
    pub fn share_gradients(&mut self) {
        let lives = self.gradient_lives();
        // the first array remains that of the input
        let ends = [0, self.pieces.len()].map(|at| self.points[at].gradient);
        let own: Vec<usize> = ends.into_iter().chain(self.transient.map(|[_, own]| own)).collect();
        let mut arrays: Vec<SharedArray> = Vec::new();
        let mut numbers = vec![usize::MAX; self.num_gradients];
        for number in own {
            if numbers[number] == usize::MAX {
                numbers[number] = arrays.len();
                arrays.push(SharedArray { width: self.gradient_width(number), last: usize::MAX });
            }
        }
        let mut others: Vec<usize> = (0..numbers.len()).filter(|at| numbers[*at] == usize::MAX).collect();
        others.sort_by_key(|number| lives[*number].first);
        for number in others {
            let (Life { first, last }, width) = (lives[number], self.gradient_width(number));
            let free = (0..arrays.len()).filter(|at| arrays[*at].last < first);
            // what was used last is in the caches
            let best =
                free.min_by_key(|at| (width.saturating_sub(arrays[*at].width), Reverse(arrays[*at].last)));
            let at = best.unwrap_or(arrays.len());
            if at == arrays.len() {
                arrays.push(SharedArray { width, last });
            }
            let array = &mut arrays[at];
            *array = SharedArray { width: array.width.max(width), last };
            numbers[number] = at;
        }
        for point in &mut self.points {
            point.gradient = numbers[point.gradient];
            point.other_gradients.iter_mut().for_each(|other| *other = numbers[*other]);
        }
        for piece in &mut self.pieces {
            piece.input_gradient = numbers[piece.input_gradient];
            if let Some(copy) = piece.added.as_mut().and_then(|added| added.gradient.as_mut()) {
                *copy = numbers[*copy];
            }
        }
        if let Some([_, gradient]) = &mut self.transient {
            *gradient = numbers[*gradient];
        }
        self.num_gradients = arrays.len();
        self.shares_gradients = true;
    }

    /// Returns the life of each array of gradients.
    fn gradient_lives(&self) -> Vec<Life> {
        let mut lives = vec![Life { first: usize::MAX, last: 0 }; self.num_gradients];
        for (at, piece) in self.pieces.iter().enumerate() {
            let point = &self.points[piece.input];
            let merged = (piece.input_gradient == point.gradient).then_some(&point.other_gradients);
            let own = [self.points[at + 1].gradient, piece.input_gradient];
            let others = merged.into_iter().flatten().copied();
            // an exchange before a layer is done in the pass of the layer
            let is_before_layer = self.exchange_before(at + 1).is_some();
            let pass = self.pieces.len() - 1 - at - usize::from(is_before_layer);
            for number in own.into_iter().chain(others).chain(piece.added.and_then(|added| added.gradient)) {
                let life = &mut lives[number];
                *life = Life { first: life.first.min(pass), last: life.last.max(pass) };
            }
        }
        lives
    }
}
