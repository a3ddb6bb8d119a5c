//! Networks in files.

use std::path::Path;

use crate::checkpoint::{Checkpoint, group_name};
use crate::dataset::Tokeniser;
use crate::nn::{Features, LayerKind, Loss, Model, Network, TensorSpec};
use crate::{Error, Result};

/// The context of a network that would take any.
const ANY_CONTEXT: usize = 256;

/// A network in a checkpoint, with its weights.
pub struct TrainedNetwork {
    file: Checkpoint,
    network: Network,
}

impl TrainedNetwork {
    /// Opens a checkpoint or a file of `--export`. Not collective.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or has no network in it.
    pub fn open(path: &Path) -> Result<TrainedNetwork> {
        let file = Checkpoint::open_weights(path)?;
        let source = path.display().to_string();
        let text = file.description.written_by.get("network").and_then(|text| text.as_str());
        let Some(text) = text else {
            let why = "it has no network in it; files that Phalanx writes do";
            return Err(Error::input(format!("reading {source}"), why));
        };
        let network = Network::from_text(text, &source, &file.description.model, Loss::CrossEntropy)?;
        Ok(TrainedNetwork { file, network })
    }

    /// Returns the tokeniser of the text with which the network was trained, if it was one.
    pub fn tokeniser(&self) -> Option<Tokeniser> {
        self.file.description.config.get("tokens")?.as_str().and_then(Tokeniser::from_text)
    }

    /// Builds the network for inputs of shape `input`. Not collective.
    ///
    /// # Errors
    /// The network does not fit.
    pub fn build(&self, input: Features) -> Result<Model> {
        self.network.build(input)
    }

    /// Builds the network for sequences of tokens, of the length with which it was trained. Not
    /// collective.
    ///
    /// # Errors
    /// The network does not take tokens.
    pub fn build_for_tokens(&self, vocabulary: usize) -> Result<Model> {
        let one = self.network.build(Features::Tokens { len: 1, vocabulary })?;
        let table = one.layers.iter().find(|layer| matches!(layer.kind, LayerKind::Positions(_)));
        let name = table.map(|layer| &one.tensors[layer.tensors.start].name);
        let found = self.file.tensors.iter().find(|tensor| Some(&tensor.name) == name);
        let len = found.map_or(ANY_CONTEXT, |tensor| tensor.shape[0]);
        self.network.build(Features::Tokens { len, vocabulary })
    }

    /// Reads the values of a tensor of the network. Not collective.
    ///
    /// # Errors
    /// The file has no such tensor, or one of another shape.
    pub fn read(&self, tensor: &TensorSpec) -> Result<Vec<f32>> {
        self.file.read(&group_name(None), &tensor.name, &tensor.shape)
    }
}
