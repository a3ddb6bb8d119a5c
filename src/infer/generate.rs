//! Texts of a network that predicts the next token.
//!
//! A random draw depends on the seed, the number of the text and that of the token, so a text is the same
//! on any rank. The network sees the last tokens that its context holds, as in nanoGPT. Until a text is as
//! long as the context, a token costs a pass over one position ([`Decoder`]); from then on all positions
//! are computed for each token, because every token has moved to another.

use std::ops::ControlFlow;

use rand_chacha::rand_core::Rng as _;

use super::{Decoder, TrainedNetwork};
use crate::device::Device;
use crate::nn::{Features, generator};
use crate::{Error, Result};

/// The choice of a token among those that a network predicts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits: below 1, likely tokens become likelier; 0 takes the likeliest.
    pub temperature: f32,
    /// The number of likeliest tokens of which one is chosen, if not of all.
    pub top_k: Option<usize>,
    /// The seed of the random draws.
    pub seed: u64,
}

impl Sampling {
    /// Returns the token that is drawn by the number `draw` in 0..1.
    fn choose(&self, logits: &[f32], draw: f64) -> usize {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // of equal logits, the first token comes first
        order.sort_by(|one, other| logits[*other].total_cmp(&logits[*one]));
        let most = if self.temperature == 0.0 { 1 } else { self.top_k.unwrap_or(usize::MAX) };
        order.truncate(most.clamp(1, logits.len()));
        let weight = |token: &usize| {
            let logit = f64::from(logits[*token] - logits[order[0]]);
            libm::exp(logit / f64::from(self.temperature.max(f32::MIN_POSITIVE)))
        };
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let mut rest = draw * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|weight| {
            rest -= weight;
            rest < 0.0
        });
        order[chosen.unwrap_or(0)]
    }
}

/// A network that continues texts.
pub struct TextGenerator<'a, D: Device> {
    decoder: Decoder<'a, D>,
    context: usize,
    vocabulary: usize,
    sampling: Sampling,
}

impl<'a, D: Device> TextGenerator<'a, D> {
    /// Makes a generator of the network in `trained`. Not collective.
    ///
    /// # Errors
    /// The network does not predict a token for each position from those before it, its weights cannot be
    /// read, or the device does not have enough memory.
    pub fn new(device: &'a D, trained: &TrainedNetwork, sampling: Sampling) -> Result<TextGenerator<'a, D>> {
        let model = trained.build()?;
        let refused = |why: &str| Error::input("continuing a text with this network", why);
        match (model.input, model.output) {
            (Features::Tokens { len, vocabulary }, Features::Sequence { width, .. })
                if width >= vocabulary =>
            {
                let decoder = Decoder::new(device, trained, &model)?.ok_or_else(|| {
                    let why = "its attention is not causal, so in training a position saw the token that it \
                               was to predict; train with causal=#true";
                    refused(why)
                })?;
                Ok(TextGenerator { decoder, context: len, vocabulary, sampling })
            }
            (input, output) => {
                Err(refused(&format!("it maps {input} to {output}; a text needs an output for each token")))
            }
        }
    }

    /// Continues the text number `text`, which begins with `prompt`, by `num_tokens` tokens, and calls
    /// `show` with each, until it wants no more. Not collective.
    ///
    /// # Errors
    /// The prompt is empty, an output of the network is NaN or infinite, or `show` or the device failed.
    pub fn run(
        &mut self,
        text: u64,
        prompt: &[u16],
        num_tokens: usize,
        show: &mut dyn FnMut(usize) -> Result<ControlFlow<()>>,
    ) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::input("continuing a text", "the prompt has no token"));
        }
        let mut random = generator(self.sampling.seed, "generate.text");
        random.set_stream(text);
        let mut tokens: Vec<f32> = prompt.iter().map(|token| f32::from(*token)).collect();
        for _ in 0..num_tokens {
            let seen = &tokens[tokens.len().saturating_sub(self.context)..];
            let draw = f64::from(random.next_u32()) / f64::from(u32::MAX) * (1.0 - f64::EPSILON);
            let (mut chosen, sampling, vocabulary) = (0, self.sampling, self.vocabulary);
            self.decoder.run(seen, &mut |outputs| {
                let outputs = &outputs[..vocabulary];
                check_finite(outputs, tokens.len())?;
                chosen = sampling.choose(outputs, draw);
                Ok(())
            })?;
            tokens.push(chosen as f32);
            if show(chosen)?.is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// Refuses outputs after `num_tokens` of a text of which no token can be drawn.
fn check_finite(outputs: &[f32], num_tokens: usize) -> Result<()> {
    let Some(token) = outputs.iter().position(|output| !output.is_finite()) else { return Ok(()) };
    let why = format!(
        "the output for token {token} is {} after {num_tokens} tokens; inspect shows the range of the \
         network's weights",
        outputs[token]
    );
    Err(Error::failed("continuing a text", why))
}

#[cfg(test)]
mod tests {
    use super::{Sampling, check_finite};

    #[test]
    fn outputs_of_which_no_token_can_be_drawn_are_refused() {
        check_finite(&[0.0, -3e38, 3e38], 1).unwrap();
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = check_finite(&[0.0, wrong, 1.0], 7).unwrap_err().to_string();
            assert!(error.contains(&format!("the output for token 1 is {wrong} after 7 tokens")), "{error}");
        }
    }

    #[test]
    fn draws_follow_the_weights() {
        let logits = [0.0, 2.0_f32.ln(), f32::NEG_INFINITY, 1.0_f32.ln()];
        let sampling = Sampling { temperature: 1.0, top_k: None, seed: 1 };
        let count = |sampling: Sampling| {
            let mut counts = [0_i32; 4];
            (0..4000).for_each(|at| counts[sampling.choose(&logits, (f64::from(at) + 0.5) / 4000.0)] += 1);
            counts
        };
        assert_eq!(count(sampling), [1000, 2000, 0, 1000]);
        // of equal weights, the first token is kept
        assert_eq!(count(Sampling { top_k: Some(1), ..sampling }), [0, 4000, 0, 0]);
        let two = count(Sampling { top_k: Some(2), ..sampling });
        assert!(two[2] == 0 && two[3] == 0 && two[1].abs_diff(2 * two[0]) < 4, "{two:?}");
        assert_eq!(count(Sampling { temperature: 0.0, ..sampling }), [0, 4000, 0, 0]);
    }
}
