//! The outputs of a growing sequence beside those of whole ones, and scores of any pieces.

use std::path::Path;

use super::prediction::Predictions;
use super::{Decoder, PredictionShape, Predictor, Score, TrainedNetwork};
use crate::checkpoint::{Contents, Description, StateSource, write};
use crate::dataset::{Table, Targets};
use crate::device::Cpu;
use crate::nn::{Features, GptSizes, Initial, Loss, Model, Network};

/// Weights of no meaning.
struct Drawn<'m>(&'m Model);

impl StateSource for Drawn<'_> {
    fn read(&mut self, write: &mut dyn FnMut(&[f32]) -> std::io::Result<()>) -> std::io::Result<()> {
        self.0.tensors.iter().try_for_each(|tensor| {
            let mut values = vec![0.0; tensor.num_elements()];
            Initial::Normal { deviation: 0.3 }.fill(1, &tensor.name, 0, &mut values);
            write(&values)
        })
    }
}

/// Writes `network` for `input` to `path`, and opens it.
fn trained(network: &Network, input: Features, path: &Path) -> (TrainedNetwork, Model) {
    let model = network.build(input).unwrap();
    let setting = |name: &str, value: String| (name.to_owned(), value.into());
    let description = Description {
        model: model.name.clone(),
        config: [setting("inputs", input.to_string())].into(),
        network: Some(model.text.clone()),
        ..Description::default()
    };
    write(path, &Contents::new(&model.tensors, &[], description), &mut Drawn(&model), &mut |_| ()).unwrap();
    (TrainedNetwork::open(path).unwrap(), model)
}

/// Files written before `/network` have the text among the settings.
#[test]
fn a_network_among_the_settings_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("earlier.h5");
    let input = Features::Flat(5);
    let network = Network::deep_mlp(4, 1);
    let (_, model) = trained(&network, input, &path);
    let setting = |name: &str, value: String| (name.to_owned(), value.into());
    let description = Description {
        model: model.name.clone(),
        config: [setting("inputs", input.to_string())].into(),
        written_by: [setting("network", model.text.clone())].into(),
        ..Description::default()
    };
    write(&path, &Contents::new(&model.tensors, &[], description), &mut Drawn(&model), &mut |_| ()).unwrap();
    let found = TrainedNetwork::open(&path).unwrap();
    assert_eq!((found.input(), found.build().unwrap().text), (input, model.text));
}

const GROUPED: &str = "network \"grouped\" loss=\"cross-entropy\"\nembedding 24 deviation=1.0\n\
    positions deviation=1.0\nrepeat 2 {\nresidual {\nlayer-norm bias=#false\n\
    attention 6 key-value-heads=2 causal=#true rotary=100\n}\nresidual {\nrms-norm\nlinear 40\n\
    gated-linear-unit \"silu\"\nlinear 24\n}\n}\nlinear 19\n";

#[test]
fn a_growing_sequence_has_the_bits_of_whole_ones() {
    const CONTEXT: usize = 40;
    let folder = tempfile::tempdir().unwrap();
    let input = Features::Tokens { len: CONTEXT, vocabulary: 17 };
    let grouped = Network::from_text(GROUPED, "a test", "grouped", Loss::CrossEntropy).unwrap();
    let small = GptSizes { layers: 2, heads: 2, width: 16, bias: true, dropout: 0.0 };
    let narrow = GptSizes { layers: 3, heads: 1, width: 12, bias: false, dropout: 0.5 };
    let networks = [Network::gpt(small), Network::gpt(narrow), grouped];
    for (number, network) in networks.iter().enumerate() {
        for threads in [1, 2] {
            let device = Cpu::new(threads).unwrap();
            let (file, model) = trained(network, input, &folder.path().join(format!("{number}.h5")));
            let mut whole = Predictor::new(&device, &file, &model, 1).unwrap();
            let mut decoder = Decoder::new(&device, &file, &model).unwrap().expect("it continues");
            let width = model.output.last_dimension();
            let text: Vec<f32> = (0..60).map(|at| ((at * at + 3 * at) % 17) as f32).collect();
            let mut other = text.clone();
            other[7] = 16.0;
            // a text that grows to the context and beyond, then one that has the same beginning
            let grown = (5..=60_usize).map(|end| &text[end.saturating_sub(CONTEXT)..end]);
            let again = [4, 30, 31, 20, 40, 1].map(|end| &other[..end]);
            for tokens in grown.chain(again) {
                let (mut found, mut expected) = (Vec::new(), Vec::new());
                let mut keep = |outputs: &[f32]| {
                    found = outputs.iter().map(|output| output.to_bits()).collect();
                    Ok(())
                };
                decoder.run(tokens, &mut keep).unwrap();
                let mut fill = |input: &mut [f32]| {
                    input.fill(0.0);
                    input[..tokens.len()].copy_from_slice(tokens);
                    Ok(())
                };
                let mut look = |outputs: &[f32]| {
                    let last = &outputs[(tokens.len() - 1) * width..][..width];
                    expected = last.iter().map(|output| output.to_bits()).collect::<Vec<u32>>();
                    Ok(())
                };
                whole.run(1, &mut fill, &mut look).unwrap();
                assert_eq!(found, expected, "{} after {} tokens", model.name, tokens.len());
            }
        }
    }
}

#[test]
fn a_network_that_sees_later_tokens_is_not_continued() {
    let folder = tempfile::tempdir().unwrap();
    let text = GROUPED.replace(" causal=#true", "");
    let network = Network::from_text(&text, "a test", "bidirectional", Loss::CrossEntropy).unwrap();
    let input = Features::Tokens { len: 8, vocabulary: 17 };
    let (file, model) = trained(&network, input, &folder.path().join("a.h5"));
    let device = Cpu::new(1).unwrap();
    assert!(Decoder::new(&device, &file, &model).unwrap().is_none());
}

#[test]
fn a_score_has_the_same_bits_however_samples_are_cut() {
    let model = Network::deep_mlp(3, 1).build(Features::Flat(3)).unwrap();
    let mut samples = vec![0.0; 4001];
    Initial::Normal { deviation: 5.0 }.fill(1, "losses", 0, &mut samples);
    let losses: Vec<f32> = samples.iter().map(|exponent| exponent.exp()).collect();
    let (features, targets) = (Features::Flat(3), Targets::Nothing);
    let data = Table { source: "test".into(), features, targets, inputs: vec![], target_values: vec![] };
    let mean = |len: usize| {
        let mut score = Score::new(PredictionShape::new(&model, &data));
        for losses in losses.chunks(len) {
            score.add(&Predictions { losses: losses.to_vec(), ..Predictions::default() });
        }
        score.summary().loss.unwrap().to_bits()
    };
    let whole = mean(losses.len());
    assert!([1, 7, 500, 2000].into_iter().all(|len| mean(len) == whole));
}
