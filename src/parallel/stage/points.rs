//! The pieces of a stage, and the points and arrays between them: pure logic.

use smallvec::SmallVec;

use crate::parallel::tensor::exchange::{Exchange, ExchangeKind};
use crate::parallel::tensor::{LayerPart, Piece};

/// A piece of a stage.
#[derive(Debug, Clone)]
pub(super) struct StagePiece {
    pub(super) piece: Piece,
    /// The number of the piece's layer in the model.
    pub(super) layer: usize,
    /// The point that the piece reads.
    pub(super) input: usize,
    /// The array into which the backward pass writes the gradient of the input.
    pub(super) input_gradient: usize,
    /// The value that is added to the output.
    pub(super) added: Option<AddedValue>,
    /// The sum over the ranks of what positions add to the gradients of the piece's parameters.
    pub(super) position_sums: Option<Exchange>,
}

/// The number, while a stage is built, of the array of values and of that of gradients which all transient
/// points share.
const TRANSIENT: usize = usize::MAX;

/// A value that is added to the output of a piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct AddedValue {
    pub(super) point: usize,
    /// The array to which the backward pass copies the gradient of the output, before its activation, unless
    /// that is read where it is.
    pub(super) gradient: Option<usize>,
}

/// A place before, between or after the pieces of a stage.
#[derive(Debug, Clone)]
pub(super) struct Point {
    /// The number of values of a row.
    pub(super) width: usize,
    /// The number of the buffer that holds the values.
    pub(super) value: usize,
    /// The number of the buffer that holds their gradient.
    pub(super) gradient: usize,
    /// The number of arrays of values: several before an exchange that adds them up.
    pub(super) num_value_sums: usize,
    /// The number of arrays of gradients.
    pub(super) num_gradient_sums: usize,
    /// The numbers of arrays of values and of gradients that this rank fills, if there are several; one
    /// after an exchange in place.
    pub(super) num_own_sums: [usize; 2],
    /// The arrays with the other parts of the gradient, from the pieces that read this point too.
    pub(super) other_gradients: SmallVec<[usize; 2]>,
    /// True if the values, and the gradients, are there for one piece before and one after the point, in
    /// arrays that other points use too.
    pub(super) is_transient: bool,
}

impl Point {
    /// Returns the number of values of a row of the gradient, which may be several sums.
    pub(super) fn gradient_width(&self) -> usize {
        self.width * self.num_gradient_sums
    }
}

/// A stage that is being built.
pub(super) struct StageBuilder {
    pub(super) pieces: Vec<StagePiece>,
    pub(super) points: Vec<Point>,
    pub(super) num_values: usize,
    pub(super) num_gradients: usize,
    /// The number of the stage's input among the values of the model.
    first_value: usize,
    /// The point of each value of the model from there on.
    places: Vec<usize>,
}

impl StageBuilder {
    /// Begins with an input of `width` values per row, which is value `first_value` of the model.
    pub(super) fn new(width: usize, first_value: usize) -> StageBuilder {
        let input = Point {
            width,
            value: 0,
            gradient: 0,
            num_value_sums: 1,
            num_gradient_sums: 1,
            num_own_sums: [1; 2],
            other_gradients: SmallVec::new(),
            is_transient: false,
        };
        StageBuilder {
            pieces: Vec::new(),
            points: vec![input],
            num_values: 1,
            num_gradients: 1,
            first_value,
            places: vec![0],
        }
    }

    /// Adds the pieces of a layer, whose tensors are numbered from `first_tensor` on.
    pub(super) fn add(&mut self, part: &LayerPart, first_tensor: usize) {
        let place = |value: usize| self.places[value - self.first_value];
        let (first, added) = (place(part.inputs.first), part.inputs.added.map(place));
        // what is added is added to the output of the layer, before an exchange
        let last = part.pieces.iter().rposition(|piece| matches!(piece, Piece::Layer(_)));
        for (number, piece) in part.pieces.iter().enumerate() {
            let piece = match piece {
                Piece::Layer(layer) => Piece::Layer(layer.clone().with_tensors_from(first_tensor)),
                exchange => exchange.clone(),
            };
            let input = if number == 0 { first } else { self.pieces.len() };
            let position_sums = part.position_sums.filter(|_| matches!(piece, Piece::Layer(_)));
            let is_transient = is_transient(part, number);
            let added = added.filter(|_| Some(number) == last);
            self.add_piece(piece, part.number, input, added, is_transient);
            if let Some(piece) = self.pieces.last_mut() {
                piece.position_sums = position_sums;
            }
        }
        self.places.push(self.pieces.len());
    }

    /// Gives the arrays of transient points their numbers, and returns these, if there are any: of values
    /// and of gradients.
    pub(super) fn number_transients(&mut self) -> Option<[usize; 2]> {
        let has_any = self.points.iter().any(|point| point.is_transient);
        let numbers = has_any.then_some([self.num_values, self.num_gradients])?;
        let [value, gradient] = numbers;
        for point in self.points.iter_mut().filter(|point| point.is_transient) {
            (point.value, point.gradient) = (value, gradient);
        }
        for piece in self.pieces.iter_mut().filter(|piece| piece.input_gradient == TRANSIENT) {
            piece.input_gradient = gradient;
        }
        (self.num_values, self.num_gradients) = (value + 1, gradient + 1);
        Some(numbers)
    }

    fn add_piece(
        &mut self,
        piece: Piece,
        layer: usize,
        input: usize,
        added: Option<usize>,
        is_transient: bool,
    ) {
        // true if no piece has read the input yet
        let is_first_reader = input == self.pieces.len();
        let input_gradient = match is_first_reader {
            true => self.points[input].gradient,
            false => self.new_gradient(),
        };
        if !is_first_reader {
            self.points[input].other_gradients.push(input_gradient);
        }
        let before = &self.points[input];
        let (value, is_in_place, width) = match &piece {
            Piece::Layer(layer) => (None, layer.is_elementwise(), layer.output_len()),
            Piece::Exchange(exchange) if exchange.is_in_place() => (Some(before.value), true, before.width),
            Piece::Exchange(exchange) => (None, false, exchange.output_len()),
        };
        let value = value.unwrap_or_else(|| match is_transient {
            true => TRANSIENT,
            false => {
                self.num_values += 1;
                self.num_values - 1
            }
        });
        let gradient = match is_in_place {
            true => input_gradient,
            false if is_transient => TRANSIENT,
            false => self.new_gradient(),
        };
        let mut after = Point {
            width,
            value,
            gradient,
            num_value_sums: 1,
            num_gradient_sums: 1,
            num_own_sums: [1; 2],
            other_gradients: SmallVec::new(),
            is_transient,
        };
        if let Piece::Exchange(exchange) = &piece {
            self.points[input].num_value_sums = exchange.num_value_sums();
            after.num_gradient_sums = exchange.num_gradient_sums();
            let (own, is_in_place) = (exchange.num_own_sums, exchange.is_in_place());
            self.points[input].num_own_sums[0] = exchange.num_value_sums().min(own);
            after.num_own_sums[1] = if is_in_place { 1 } else { exchange.num_gradient_sums().min(own) };
        }
        let added = added.map(|point| self.add_value(point, input, gradient));
        self.pieces.push(StagePiece { piece, layer, input, input_gradient, added, position_sums: None });
        self.points.push(after);
    }

    fn new_gradient(&mut self) -> usize {
        self.num_gradients += 1;
        self.num_gradients - 1
    }

    /// Adds the value at `point` to the output of a piece that reads `input`, whose gradient is in
    /// array `gradient`.
    fn add_value(&mut self, point: usize, input: usize, gradient: usize) -> AddedValue {
        let has_reader = self.pieces.iter().any(|piece| piece.input == point);
        if !has_reader {
            // the end of a branch, whose pieces may change the gradient
            return AddedValue { point, gradient: Some(self.points[point].gradient) };
        }
        let copy = self.may_change(input, gradient).then(|| self.new_gradient());
        self.points[point].other_gradients.push(copy.unwrap_or(gradient));
        AddedValue { point, gradient: copy }
    }

    /// Returns true if the backward pass of those before a piece that reads `input` changes array `gradient`
    /// in place, where the gradient of the piece's output is.
    fn may_change(&self, input: usize, gradient: usize) -> bool {
        let changes = |piece: &Piece| match piece {
            Piece::Layer(layer) => layer.changes_gradient(),
            Piece::Exchange(exchange) => exchange.kind == ExchangeKind::SumGradient,
        };
        let produced = |point: &usize| self.points[*point].gradient == gradient;
        let earlier = std::iter::successors(Some(input).filter(produced), |point| {
            let before = self.pieces[point.checked_sub(1)?].input;
            Some(before).filter(produced)
        });
        let producers = earlier.filter_map(|point| self.pieces.get(point.checked_sub(1)?));
        producers.into_iter().any(|producer| changes(&producer.piece))
    }
}

/// Returns true if the point after piece `number` of `part` is transient: what is gathered for a divided
/// layer, which is gathered again for the gradient of its weight; partial sums before a scatter; and what is
/// gathered for a rank to take its positions of it.
fn is_transient(part: &LayerPart, number: usize) -> bool {
    let kind = |number: usize| match part.pieces.get(number)? {
        Piece::Layer(_) => Some(None),
        Piece::Exchange(exchange) => Some(Some(exchange.kind)),
    };
    let Some((before, after)) = kind(number).zip(kind(number + 1)) else { return false };
    matches!(
        (before, after),
        (Some(ExchangeKind::Gather), None)
            | (None, Some(ExchangeKind::Scatter))
            | (Some(ExchangeKind::GatherOutput), Some(ExchangeKind::TakeOwn))
    )
}
