//! The number of micro-batches of a step.

use super::{DeviceChoice, TrainOptions};
use crate::nn::Model;
use crate::parallel::zero::ZeroStage;
use crate::{Error, Result};

/// The most bytes of a layer's outputs for a micro-batch, so that the next layer finds them in the cache of
/// a core of a CPU.
const CACHED_BYTES: usize = 512 << 10;

/// The fewest values of activations of a micro-batch for each parameter. Every micro-batch reads all
/// parameters and adds to all of their gradients, which this keeps a small share of its work: with 4 a
/// parameter, steps of GPTs take 3 % less time than uncut, with 2 as long or longer.
const ACTIVATIONS_PER_PARAMETER: usize = 3;

impl TrainOptions {
    /// Returns the number of micro-batches into which a replica of one stage cuts its share of the `batch`
    /// samples that `num_replicas` divide among them: that of --micro-batches, if it is given. Otherwise it
    /// is 1, or, on the CPU without --zero 2 or 3, a power of two, as numbers of leaves are, that keeps the
    /// largest activations in the cache, as long as each micro-batch has enough of them for each parameter.
    /// Gradients have the same bits for any number. Not collective.
    pub fn micro_batches(&self, model: &Model, batch: usize, num_replicas: usize) -> usize {
        let share = (batch / num_replicas).max(1);
        let on_cpu = self.machine.device == DeviceChoice::Cpu;
        // with --zero 2 and 3, gradients of one micro-batch need less memory and fewer messages
        let reduces_once = !self.zero.0.is_some_and(ZeroStage::divides_gradients);
        let usual = if on_cpu && reduces_once { cached(model, share) } else { 1 };
        self.micro_batches.unwrap_or(usual)
    }

    /// Returns the number of micro-batches into which a pipeline of `num_ranks` cuts the `share` of a batch
    /// that one replica has: that of --micro-batches, if it is given. Otherwise it is 1 for a single rank;
    /// for several, the least number from two to four per rank that divides the share, or, if none does, two
    /// per rank, but no more than the share. Not collective.
    pub(super) fn pipeline_micro_batches(&self, share: usize, num_ranks: usize) -> usize {
        let fits = |number: &usize| share.is_multiple_of(*number);
        let two = num_ranks.saturating_mul(2).max(1);
        let usual = || {
            if num_ranks == 1 {
                return 1;
            }
            (two..=two.saturating_mul(2).min(share)).find(fits).unwrap_or(two.min(share))
        };
        self.micro_batches.unwrap_or_else(usual)
    }
}

/// Checks that a batch of `batch` samples can be cut into `num_micro_batches`, and returns a remark if some
/// micro-batches of a replica, which has `share` of the samples, are empty. The check itself does not depend
/// on the number of ranks. Not collective.
///
/// # Errors
/// There are fewer samples than micro-batches.
pub(in crate::train) fn check_micro_batches(
    num_micro_batches: usize,
    batch: usize,
    share: usize,
) -> Result<Option<String>> {
    if num_micro_batches > batch {
        let why = format!(
            "{num_micro_batches} micro-batches are more than the {batch} samples of a batch; \
             {batch} or fewer would do"
        );
        return Err(Error::input("cutting batches into micro-batches", why));
    }
    Ok((share < num_micro_batches).then(|| {
        format!(
            "of {num_micro_batches} micro-batches some are empty, because a replica has {share} of the \
             {batch} samples of a batch; --micro-batches {share} would do"
        )
    }))
}

/// Returns the number of micro-batches of `share` samples that keep activations of `model` in the cache.
fn cached(model: &Model, share: usize) -> usize {
    let (mut largest, mut kept) = (0, 0_usize);
    for layer in &model.layers {
        largest = largest.max(layer.output_len());
        kept = kept.saturating_add(layer.output_len().saturating_add(layer.saved_len()));
    }
    let bytes = share.saturating_mul(largest).saturating_mul(size_of::<f32>());
    let wanted = bytes.div_ceil(CACHED_BYTES).next_power_of_two();
    let most =
        share.saturating_mul(kept) / ACTIVATIONS_PER_PARAMETER.saturating_mul(model.num_parameters().max(1));
    let most = most.min(share).max(1);
    // the largest power of two that is not above
    wanted.min(1 << most.ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nn::{Features, GptSizes, Network};

    #[test]
    fn large_activations_of_few_parameters_are_cut() {
        let image = Features::Image { height: 32, width: 32, channels: 3 };
        let resnet = Network::resnet(3, 16, 10).build(image).unwrap();
        // 16 channels of 32 × 32 are 64 KiB
        assert_eq!([1, 16, 24, 64, 128, 100].map(|share| cached(&resnet, share)), [1, 2, 4, 8, 16, 16]);
        let sizes = GptSizes { layers: 6, heads: 6, width: 384, bias: false, dropout: 0.0 };
        let gpt = Network::gpt(sizes).build(Features::Tokens { len: 256, vocabulary: 65 }).unwrap();
        assert_eq!([4, 8, 16].map(|share| cached(&gpt, share)), [1, 2, 4]);
        let sizes = GptSizes { layers: 4, heads: 4, width: 128, ..sizes };
        let gpt = Network::gpt(sizes).build(Features::Tokens { len: 64, vocabulary: 65 }).unwrap();
        assert_eq!([6, 12, 24].map(|share| cached(&gpt, share)), [1, 2, 4]);
        let mlp = Network::deep_mlp(1024, 4).build(Features::Flat(1024)).unwrap();
        assert_eq!(cached(&mlp, 1024), 1);
        // parameters do not count for ever
        assert!(cached(&mlp, 1 << 20) > 1);
        assert!(cached(&resnet, usize::MAX).is_power_of_two());
    }
}
