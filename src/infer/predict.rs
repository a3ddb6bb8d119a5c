//! Predictions for all samples of a data set, which the ranks share.
//!
//! Each rank takes every N-th piece of the data, reads it, and sends its predictions to rank 0, which
//! writes them to their places in the file and compares them with the targets. To bound the memory of
//! predictions, a rank holds one piece at a time, a block of the data or a part of it. All ranks finish a
//! piece before any begins the next, so that they can agree on an error of one rank. A sample's predictions
//! have the same bits in any piece, so the file has the same bytes for any number of ranks.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::Predictor;
use super::prediction::{PredictionShape, Predictions};
use super::prediction_file::PredictionFile;
use super::score::Score;
use crate::Result;
use crate::comm::Communicator;
use crate::dataset::{Batches, Dataset, Order, Sampler, Standardise};
use crate::device::Device;
use crate::nn::Model;

/// The most values of all layers that are computed at once.
const MOST_VALUES: usize = 1 << 22;

/// The most samples that are computed at once.
const MOST_SAMPLES: usize = 1024;

/// The most values of the predictions of a piece: 16 MiB.
const MOST_KEPT: usize = 1 << 22;

/// The time between two log lines about how far it is.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// The pieces that a rank has at least, so that ranks finish together.
const PIECES_OF_A_RANK: usize = 2;

/// Returns the number of samples to prepare a [`Predictor`] of `model` for.
pub fn rows_at_once(model: &Model) -> usize {
    let values =
        model.layers.iter().fold(model.input.len(), |sum, layer| sum.saturating_add(layer.output_len()));
    (MOST_VALUES / values.max(1)).clamp(1, MOST_SAMPLES)
}

/// The samples of one or several sets, one set after the other, in pieces.
pub struct SampleSets {
    sets: Vec<Batches>,
    /// The set of each piece, the samples in it, and the number of the first of them over all sets.
    pieces: Vec<(usize, Range<usize>, usize)>,
    num_samples: usize,
}

impl SampleSets {
    /// Cuts `sets`, whose samples are standardised by `standardise`, into pieces for `num_ranks` ranks:
    /// blocks that are read together, or parts of them. A sample has predictions of `shape`.
    pub fn new(
        sets: Vec<Box<dyn Dataset>>,
        standardise: &Standardise,
        shape: PredictionShape,
        num_ranks: usize,
    ) -> SampleSets {
        let num_samples: usize = sets.iter().map(|set| set.num_samples()).sum();
        let most_kept = MOST_KEPT / shape.num_values().max(1);
        let most = num_samples.div_ceil(num_ranks * PIECES_OF_A_RANK).min(most_kept).max(1);
        let (mut pieces, mut first) = (Vec::new(), 0);
        for (number, set) in sets.iter().enumerate() {
            let blocks = set.blocks();
            for block in 0..blocks.num_blocks() {
                let samples = blocks.samples(block);
                let num = samples.len().div_ceil(most);
                for part in 0..num {
                    let part = crate::sums::shard(samples.len(), part, num);
                    let samples = samples.start + part.start..samples.start + part.end;
                    first += samples.len();
                    pieces.push((number, samples.clone(), first - samples.len()));
                }
            }
        }
        let batches = |set: Box<dyn Dataset>| {
            let sampler = Sampler::new(set.num_samples(), set.num_samples(), Order::Sequential, 0);
            Batches::new(set, sampler, Some(standardise.clone()))
        };
        SampleSets { sets: sets.into_iter().map(batches).collect(), pieces, num_samples }
    }

    /// Returns the number of samples of all sets.
    pub fn num_samples(&self) -> usize {
        self.num_samples
    }

    /// Computes the predictions of piece `piece`, at most `rows` samples at a time.
    fn compute<D: Device>(
        &mut self,
        predictor: &mut Predictor<'_, D>,
        rows: usize,
        shape: PredictionShape,
        piece: usize,
    ) -> Result<Predictions> {
        let (set, samples, first) = self.pieces[piece].clone();
        let (input_len, target_len) = (predictor.input().len(), shape.num_targets());
        let mut inputs = vec![0.0; samples.len() * input_len];
        let mut targets = vec![0.0; samples.len() * target_len];
        self.sets[set].read_samples(samples.clone(), &mut inputs, &mut targets)?;
        let mut predictions = Predictions::default();
        for start in (0..samples.len()).step_by(rows) {
            let part = start..samples.len().min(start + rows);
            let inputs = &inputs[part.start * input_len..part.end * input_len];
            let targets = &targets[part.start * target_len..part.end * target_len];
            predictor.run(
                part.len(),
                &mut |input| {
                    input.copy_from_slice(inputs);
                    Ok(())
                },
                &mut |outputs| predictions.push(shape, outputs, targets, first + start),
            )?;
        }
        Ok(predictions)
    }
}

/// Predicts all samples of `sets` with `predictor`, which has been prepared for `rows` rows, writes the
/// predictions to `file`, which rank 0 alone may have, and returns their score on rank 0. Collective.
///
/// # Errors
/// A sample cannot be read, its target is no class of the network, the device failed, or the file cannot
/// be written: the same error on every rank.
pub fn predict<D: Device>(
    all: &Communicator,
    predictor: &mut Predictor<'_, D>,
    rows: usize,
    shape: PredictionShape,
    sets: &mut SampleSets,
    mut file: Option<PredictionFile>,
) -> Result<Score> {
    let mut score = Score::new(shape);
    let mut written = Ok(());
    let mut last_line = Instant::now();
    for round in (0..sets.pieces.len()).step_by(all.size()) {
        let piece = Some(round + all.rank()).filter(|piece| *piece < sets.pieces.len());
        let computed = piece.map(|piece| sets.compute(predictor, rows, shape, piece)).transpose();
        // the file's error is that of the round before
        let mut own = all.agree(std::mem::replace(&mut written, Ok(())).and(computed))?;
        if let (Some(own), false) = (&mut own, all.is_root()) {
            for array in own.arrays_mut().iter().filter(|array| !array.is_empty()) {
                all.send(array, 0, 0)?;
            }
        }
        if !all.is_root() {
            continue;
        }
        if last_line.elapsed() > BETWEEN_LINES {
            last_line = Instant::now();
            let (percent, num_samples) = (100 * sets.pieces[round].2 / sets.num_samples, sets.num_samples);
            log::info!("{percent} % of {num_samples} samples predicted");
        }
        for rank in 0..all.size() {
            let Some((_, samples, first)) = sets.pieces.get(round + rank) else { break };
            let predictions = match own.take() {
                Some(own) => own,
                None => {
                    let mut received = Predictions::zeros(shape, samples.len());
                    for array in received.arrays_mut().iter_mut().filter(|array| !array.is_empty()) {
                        all.receive(array, rank, 0)?;
                    }
                    received
                }
            };
            score.add(&predictions);
            if let (Some(file), Ok(())) = (&mut file, &written) {
                written = file.write(*first, &predictions);
            }
        }
    }
    all.agree_with_root(|| written.and_then(|()| file.map_or(Ok(()), PredictionFile::finish)))?;
    Ok(score)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataset::{Table, Targets};
    use crate::nn::{Features, Loss, Network};

    #[test]
    fn a_piece_has_few_samples_if_each_has_many_outputs() {
        const SAMPLES: usize = 3000;
        let (features, targets) = (Features::Flat(2), Targets::Nothing);
        for (outputs, longest) in [(3, 1500), (20_000, 209)] {
            let text = format!("linear {outputs}");
            let network = Network::from_text(&text, "a test", "wide", Loss::CrossEntropy).unwrap();
            let model = network.build(features).unwrap();
            let inputs = vec![0.0; 2 * SAMPLES];
            let data = Table { source: "test".into(), features, targets, inputs, target_values: vec![] };
            let shape = PredictionShape::new(&model, &data);
            let sets = SampleSets::new(vec![Box::new(data)], &Standardise::new(&[]), shape, 1);
            let mut next = 0;
            for (_, samples, first) in &sets.pieces {
                assert_eq!((samples.start, *first), (next, next));
                assert!(samples.len() <= longest && samples.len() * shape.num_values() <= MOST_KEPT);
                next = samples.end;
            }
            assert_eq!(next, SAMPLES);
            assert!(sets.pieces.iter().any(|(_, samples, _)| samples.len() + 10 > longest));
        }
    }
}
