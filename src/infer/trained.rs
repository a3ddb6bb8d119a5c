//! Networks in files.

use std::path::Path;

use xxhash_rust::xxh3::xxh3_128;

use crate::checkpoint::{
    Checkpoint, Description, INPUTS_SETTING, STANDARDISE_SETTING, TOKENS_SETTING, group_name,
};
use crate::comm::Communicator;
use crate::dataset::{Dataset, Standardise, Targets, Tokeniser};
use crate::nn::{Features, LONGEST_TEXT, Loss, Model, Network, TensorSpec};
use crate::{Error, Result};

/// A network in a checkpoint, with its weights.
pub struct TrainedNetwork {
    file: Checkpoint,
    network: Network,
    input: Features,
}

impl TrainedNetwork {
    /// Opens a checkpoint or a file of `--export` on every rank. Collective.
    ///
    /// # Errors
    /// Those of [`TrainedNetwork::open`], or ranks find different files at `path`: the same error on every
    /// rank.
    pub fn open_on_all(ranks: &Communicator, path: &Path) -> Result<TrainedNetwork> {
        let trained = ranks.agree(TrainedNetwork::open(path))?;
        let Checkpoint { description, parameters_digest, .. } = &trained.file;
        let settings = format!("{:032x}", xxh3_128(format!("{description:?}").as_bytes()));
        let identity = [
            ("the hash of the parameters".to_owned(), parameters_digest.clone()),
            ("the step".to_owned(), description.step.to_string()),
            ("the hash of the settings".to_owned(), settings),
        ];
        ranks.compare(&format!("opening {} on every node", path.display()), &identity)?;
        Ok(trained)
    }

    /// Opens a checkpoint or a file of `--export`. Not collective.
    ///
    /// # Errors
    /// The file cannot be read, is damaged, or has no network in it.
    pub fn open(path: &Path) -> Result<TrainedNetwork> {
        let file = Checkpoint::open_weights(path)?;
        let source = path.display().to_string();
        let fail = |why: &str| Error::input(format!("reading {source}"), why);
        let Description { network, written_by, .. } = &file.description;
        // earlier versions kept it among the settings
        let earlier = || written_by.get("network").and_then(|text| text.as_str());
        let text = network.as_deref().or_else(earlier);
        let input = file.description.config.get(INPUTS_SETTING).and_then(|shape| shape.as_str());
        let (Some(text), Some(input)) = (text, input) else {
            return Err(fail(&format!(
                "it does not contain the network: another program wrote it, or the text of the network was \
                 longer than {LONGEST_TEXT} bytes; --init and --resume of a training program take it"
            )));
        };
        let input = input.parse().map_err(|why: String| fail(&why))?;
        let network = Network::from_text(text, &source, &file.description.model, Loss::CrossEntropy)?;
        Ok(TrainedNetwork { file, network, input })
    }

    /// Returns the shape of the samples with which the network was trained.
    pub fn input(&self) -> Features {
        self.input
    }

    /// Returns the seed of the run, with which synthetic samples were made.
    pub fn seed(&self) -> u64 {
        self.file.description.seed
    }

    /// Returns the hash of all parameters, in hexadecimal.
    pub fn parameters_digest(&self) -> &str {
        &self.file.parameters_digest
    }

    /// Returns the tokeniser of the text with which the network was trained, if it was one.
    pub fn tokeniser(&self) -> Option<Tokeniser> {
        self.file.description.config.get(TOKENS_SETTING)?.as_str().and_then(Tokeniser::from_text)
    }

    /// Returns the standardisation with which the network was trained. A file of an earlier version does
    /// not have it; it is then that of `samples` if they are of a published set. Not collective.
    ///
    /// # Errors
    /// The file does not have it, and it was found from the training samples.
    pub fn standardise(&self, samples: &dyn Dataset) -> Result<Standardise> {
        if let Some(numbers) = &self.file.description.standardise {
            return Ok(Standardise::from_numbers(numbers));
        }
        let name = self.file.description.config.get(STANDARDISE_SETTING).and_then(|name| name.as_str());
        match name {
            Some("preset") => {
                let pairs = samples.preset().unwrap_or_default();
                let pairs: Vec<[f64; 2]> = pairs.iter().map(|pair| pair.map(f64::from)).collect();
                Ok(Standardise::new(&pairs))
            }
            Some("features") => {
                let why = "an earlier version wrote it, without the means and deviations of the training \
                           samples; resume the run with this version, which records them";
                Err(Error::input(format!("reading {}", self.file.path.display()), why))
            }
            _ => Ok(Standardise::new(&[])),
        }
    }

    /// Builds the network for samples like those with which it was trained. Not collective.
    ///
    /// # Errors
    /// The network does not fit them.
    pub fn build(&self) -> Result<Model> {
        self.network.build(self.input)
    }

    /// Builds the network for sequences of one token. Not collective.
    ///
    /// # Errors
    /// The network does not take tokens.
    pub(super) fn build_for_one_position(&self) -> Result<Model> {
        match self.input {
            Features::Tokens { vocabulary, .. } => {
                self.network.build(Features::Tokens { len: 1, vocabulary })
            }
            input => {
                Err(Error::input("continuing a sequence", format!("the network takes {input}, no tokens")))
            }
        }
    }

    /// Builds the network for `samples`. Not collective.
    ///
    /// # Errors
    /// The samples have another shape than those with which the network was trained, or targets that it
    /// does not predict; the message has both.
    pub fn build_for(&self, samples: &dyn Dataset) -> Result<Model> {
        let doing = || format!("fitting {} to {}", self.file.path.display(), samples.source());
        let (features, targets) = (samples.features(), samples.targets());
        if features != self.input {
            let why = format!(
                "the network was trained with {}, but the samples are {features}; choose others with --data \
                 or --inputs",
                self.input
            );
            return Err(Error::input(doing(), why));
        }
        let model = self.build()?;
        // targets that the loss does not read are passed over
        let are_read = targets != Targets::Nothing && model.loss != Loss::MeanOfSquares;
        if !are_read || targets.suit(model.loss, model.output) {
            return Ok(model);
        }
        let predicts = match (model.loss, model.output) {
            (Loss::CrossEntropy, Features::Sequence { len, width }) => format!("{len} tokens of {width}"),
            (Loss::CrossEntropy, output) => format!("one of {} classes", output.len()),
            (_, output @ Features::Image { channels: 2.., .. }) => format!("{output}"),
            (_, output) => format!("{} real values", output.len()),
        };
        let why = format!(
            "for each sample the network predicts {predicts}, but the targets are {targets}; --targets names \
             others"
        );
        Err(Error::input(doing(), why))
    }

    /// Reads the values of a tensor of the network. Not collective.
    ///
    /// # Errors
    /// The file has no such tensor, or one of another shape.
    pub fn read(&self, tensor: &TensorSpec) -> Result<Vec<f32>> {
        self.file.read(&group_name(None), &tensor.name, &tensor.shape)
    }
}
