//! The groups of pieces of a stage whose activations are computed again together: pure logic.
//!
//! A forward pass keeps the values between groups, and a backward pass repeats the forward pass of
//! one group after the other (Chen et al., "Training deep nets with sublinear memory cost", 2016):
//! about √n arrays are kept of n, and √n are computed again at a time.

use std::ops::Range;

use super::arrays::PieceGroup;
use super::points::{Point, StagePiece};
use super::{Head, Stage};
use crate::parallel::tensor::Piece;

/// The numbers of values of a row in the arrays of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowWidths {
    /// In the arrays of a slot that recomputation keeps: the values between groups and at the ends
    /// of the stage, and the targets.
    pub kept: usize,
    /// In each array of values between the ends of a group, for the widest group.
    pub inner_values: Vec<usize>,
    /// In the array of transient points.
    pub transient: usize,
    /// In each array of what the pieces of a group save, for the widest group.
    pub inner_saved: Vec<usize>,
    /// In the arrays of a set of gradients.
    pub gradients: usize,
}

impl RowWidths {
    /// Returns the number of values of a row in all arrays between the ends of a group.
    pub fn inner(&self) -> usize {
        self.inner_values.iter().chain(&self.inner_saved).chain([&self.transient]).sum()
    }
}

impl Stage {
    /// Returns all pieces as one group.
    pub fn one_group(&self) -> Vec<PieceGroup> {
        vec![self.group(0..self.pieces.len())]
    }

    /// Cuts the pieces into the groups that need the fewest arrays of values, where `num_slots`
    /// micro-batches keep those between groups and `num_inner` have those of a group. The widths do
    /// not count: ranks that share layers have other widths, and must exchange in one order.
    pub fn smallest_groups(&self, num_slots: usize, num_inner: usize) -> Vec<PieceGroup> {
        let cuts: Vec<usize> = (1..self.pieces.len()).filter(|at| self.can_cut(*at)).collect();
        let grouped = |num_cuts: usize| {
            let inner_cuts = (1..=num_cuts).map(|cut| cuts[cut * (cuts.len() + 1) / (num_cuts + 1) - 1]);
            let ends = inner_cuts.chain([self.pieces.len()]);
            let mut start = 0;
            let group = |end| self.group(std::mem::replace(&mut start, end)..end);
            ends.map(group).collect::<Vec<_>>()
        };
        let num_arrays = |groups: &Vec<PieceGroup>| {
            let widest = groups.iter().map(|group| group.values.len()).max().unwrap_or_default();
            num_slots * self.kept_values(groups).count() + num_inner * widest
        };
        (0..=cuts.len()).map(grouped).min_by_key(num_arrays).unwrap_or_else(|| self.one_group())
    }

    /// Returns true if the pieces from `at` on can be computed again without those before, whose
    /// arrays are then elsewhere.
    fn can_cut(&self, at: usize) -> bool {
        // a later piece may read what is before the cut; an exchange in place changes the values before
        // it
        let reads_before =
            |piece: &StagePiece| piece.input < at || piece.added.is_some_and(|added| added.point < at);
        let changes_input = matches!(&self.pieces[at].piece, Piece::Exchange(found) if found.is_in_place());
        let is_transient = self.points[at].is_transient;
        !is_transient && !changes_input && !self.pieces[at..].iter().any(reads_before)
    }

    fn group(&self, pieces: Range<usize>) -> PieceGroup {
        let (first, last) = (self.points[pieces.start].value, self.points[pieces.end].value);
        PieceGroup { pieces, values: (first + 1).min(last)..last }
    }

    /// Returns the number of values of a row in buffer `number` of values.
    pub(super) fn value_width(&self, number: usize) -> usize {
        let own = self.points.iter().filter(|point| point.value == number);
        own.map(|point| point.width * point.num_value_sums).max().unwrap_or_default()
    }

    /// Returns the number of values of a row in buffer `number` of gradients.
    pub(super) fn gradient_width(&self, number: usize) -> usize {
        let own = self.points.iter().filter(|point| point.gradient == number).map(Point::gradient_width);
        // parts of gradients of points that several pieces read
        let of_piece = |(at, piece): (usize, &StagePiece)| {
            let is_copy = piece.added.is_some_and(|added| added.gradient == Some(number));
            let is_part = piece.input_gradient == number;
            let copy = is_copy.then(|| self.points[at + 1].gradient_width());
            copy.into_iter().chain(is_part.then(|| self.points[piece.input].gradient_width()))
        };
        own.chain(self.pieces.iter().enumerate().flat_map(of_piece)).max().unwrap_or_default()
    }

    /// Returns the number of values of a row of the gradient of the inputs, which may be several sums.
    pub fn input_gradient_width(&self) -> usize {
        self.points[0].gradient_width()
    }

    /// Returns the number of values of a row of the gradient of the outputs, which may be several sums.
    pub fn output_gradient_width(&self) -> usize {
        self.points[self.pieces.len()].gradient_width()
    }

    /// Returns the number of values of a row that piece `at` saves.
    pub(super) fn saved_width(&self, at: usize) -> usize {
        match &self.pieces[at].piece {
            Piece::Layer(layer) => layer.saved_len(),
            Piece::Exchange(_) => 0,
        }
    }

    /// Returns the number of values of a row from which a piece adds up the gradients of its parameters,
    /// for the piece with the most.
    pub(super) fn position_sums_width(&self) -> usize {
        let of_piece = |piece: &StagePiece| match &piece.piece {
            Piece::Layer(layer) => layer.position_sums_len(),
            Piece::Exchange(_) => 0,
        };
        self.pieces.iter().map(of_piece).max().unwrap_or_default()
    }

    /// Returns the arrays of values that are kept between passes if those inside of `groups` are
    /// not.
    pub(super) fn kept_values<'a>(&self, groups: &'a [PieceGroup]) -> impl Iterator<Item = usize> + use<'a> {
        let transient = self.transient.map(|[value, _]| value).filter(|_| !groups.is_empty());
        let is_inner = move |number: usize| {
            transient == Some(number) || groups.iter().any(|group| group.values.contains(&number))
        };
        (0..self.num_values).filter(move |number| !is_inner(*number))
    }

    /// Returns the numbers of values of a row in the arrays that [`Stage::allocate_activations`],
    /// [`Stage::allocate_inner`] and [`Stage::allocate_gradients`] allocate for these groups.
    pub fn row_widths(&self, groups: &[PieceGroup]) -> RowWidths {
        let widest = |ranges: &dyn Fn(&PieceGroup) -> Range<usize>, width: &dyn Fn(usize) -> usize| {
            let most = groups.iter().map(|group| ranges(group).len()).max().unwrap_or_default();
            let of_array = |at: usize| {
                groups.iter().filter_map(|group| ranges(group).nth(at)).map(width).max().unwrap_or_default()
            };
            (0..most).map(of_array).collect::<Vec<_>>()
        };
        let kept: usize = self.kept_values(groups).map(|number| self.value_width(number)).sum();
        RowWidths {
            kept: kept + self.head.as_ref().map_or(0, Head::targets_per_row),
            inner_values: widest(&|group| group.values.clone(), &|number| self.value_width(number)),
            transient: self.transient.map_or(0, |[value, _]| self.value_width(value)),
            inner_saved: widest(&|group| group.pieces.clone(), &|at| self.saved_width(at)),
            gradients: (0..self.num_gradients).map(|number| self.gradient_width(number)).sum::<usize>()
                + self.position_sums_width(),
        }
    }

    /// Returns the tensors of the pieces of `group` among those of this rank.
    pub fn tensors_of_group(&self, group: &PieceGroup) -> Range<usize> {
        let mut own = group.pieces.clone().map(|at| self.tensors_of(at)).filter(|own| !own.is_empty());
        match own.next() {
            Some(first) => first.start..own.next_back().map_or(first.end, |last| last.end),
            None => 0..0,
        }
    }
}
