//! The checkpoint or the weights file with which a run starts: rank 0 finds and checks it, and
//! broadcasts its tensors to all ranks.

use std::path::Path;

use super::identity::{
    BLOCK_CUT, Identity, LEARNING_RATE_SCHEDULE, LEAVES, MODEL, MOMENTUM, OPTIMIZER, STEPS_IN_ALL,
};
use super::options::{CheckpointOptions, Resume, name_of};
use super::trainer::Trainer;
use crate::checkpoint::{self, Checkpoint, Description, Difference, Settings, TOKENS_SETTING, group_name};
use crate::comm::Communicator;
use crate::dataset::Tokeniser;
use crate::device::Device;
use crate::nn::Model;
use crate::optim::LearningRateScheduleKind;
use crate::{Error, Result};

/// The checkpoint, weights or initial weights with which a run goes on or begins, on rank 0.
pub(super) enum Start {
    /// A new run with initial weights.
    Anew,
    /// A new run with the weights of a file.
    Weights(Checkpoint),
    /// A run that goes on from a checkpoint.
    Resumed {
        checkpoint: Checkpoint,
        /// True if the file has the name and the directory that this run would have given it.
        is_in_checkpoint_dir: bool,
    },
}

/// The number of steps that have been done, and the loss of the last of them, if it is known.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct RunPosition {
    /// The number of steps done.
    pub(super) step: u64,
    /// The loss of the last step done, if it is known.
    pub(super) loss: Option<f64>,
}

/// The checkpoint from which a run was resumed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Resumed {
    /// The position of the run in the checkpoint.
    pub(super) position: RunPosition,
    /// True if the checkpoint has the name and the directory that this run would have given it.
    pub(super) is_in_checkpoint_dir: bool,
}

impl Resumed {
    const NUM_WORDS: usize = 5;

    /// Returns this checkpoint as numbers for a message, in which zeros stand for none.
    fn to_words(self) -> [i64; Resumed::NUM_WORDS] {
        let Resumed { position: RunPosition { step, loss }, is_in_checkpoint_dir } = self;
        let bits = loss.unwrap_or_default().to_bits() as i64;
        [1, step as i64, is_in_checkpoint_dir.into(), loss.is_some().into(), bits]
    }

    fn from_words(words: [i64; Resumed::NUM_WORDS]) -> Option<Resumed> {
        let [is_resumed, step, is_in_checkpoint_dir, has_loss, bits] = words;
        let loss = (has_loss == 1).then(|| f64::from_bits(bits as u64));
        let position = RunPosition { step: step as u64, loss };
        (is_resumed == 1).then_some(Resumed { position, is_in_checkpoint_dir: is_in_checkpoint_dir == 1 })
    }
}

impl Start {
    /// Finds the file that `options` ask for, and refuses one that does not belong to the run of
    /// `model` with `identity`, whose optimizer keeps `slots`. Not collective.
    ///
    /// # Errors
    /// The file is missing, damaged, or of another run; or the directory holds checkpoints that
    /// would be mistaken for this run's.
    pub(super) fn find(
        options: &CheckpointOptions,
        model: &Model,
        slots: &[&str],
        identity: &Identity,
    ) -> Result<Start> {
        for (option, path) in options.inputs() {
            if let Err(error) = std::fs::metadata(path) {
                return Err(Error::input(format!("{option} {}", path.display()), error));
            }
        }
        // a file with weights alone is passed over for an older checkpoint; one of another run is
        // refused later, whatever its slots are
        let is_of_this_run = |file: &Checkpoint| {
            let before = &file.description.config;
            [MODEL, OPTIMIZER].iter().all(|name| before.get(*name) == identity.config.get(*name))
        };
        let accept = |file: &Checkpoint| if is_of_this_run(file) { check_slots(file, slots) } else { Ok(()) };
        let directory = options.checkpoint_dir.as_deref();
        let checkpoint = match &options.resume {
            Resume::Never => None,
            Resume::Auto => {
                let anew = "to begin anew, give another --checkpoint-dir";
                directory.map(|path| newest_in(path, &accept, anew)).transpose()?.flatten()
            }
            Resume::From(path) if path.is_dir() => {
                let other = "--resume takes another directory or a file";
                Some(newest_in(path, &accept, other)?.ok_or_else(|| {
                    Error::input(format!("--resume {}", path.display()), "the directory holds no checkpoint")
                })?)
            }
            Resume::From(path) => Some(Checkpoint::open(path)?),
        };
        if let Some(directory) = directory.filter(|_| options.resume != Resume::Auto) {
            refuse_others(directory, &options.resume, checkpoint.as_ref())?;
        }
        match checkpoint {
            Some(checkpoint) => {
                accept(&checkpoint)?;
                Start::at_checkpoint(checkpoint, options, model, identity)
            }
            None => Start::with_weights(options.init.as_deref(), model, identity),
        }
    }

    fn at_checkpoint(
        checkpoint: Checkpoint,
        options: &CheckpointOptions,
        model: &Model,
        identity: &Identity,
    ) -> Result<Start> {
        let path = checkpoint.path.display();
        let before = &checkpoint.description;
        let mut differences = Difference::between(&before.config, &identity.config);
        // the run takes the leaves of its checkpoint
        differences.retain(|difference| {
            difference.name != LEAVES && (difference.name != BLOCK_CUT || difference.before.is_some())
        });
        if !differences.is_empty() {
            let words: Vec<String> = differences.iter().map(ToString::to_string).collect();
            let way_out = match options.resume {
                Resume::From(_) => "begin a new run without --resume; --init takes the weights alone",
                _ => "give another --checkpoint-dir",
            };
            let why = format!(
                "it belongs to another run: {}; restore these settings, or {way_out}",
                words.join("; ")
            );
            return Err(Error::input(format!("resuming from {path}"), why));
        }
        check_tensors(&checkpoint, model)?;
        let by_length = [LearningRateScheduleKind::Cosine, LearningRateScheduleKind::Linear]
            .iter()
            .any(|kind| identity.changeable[LEARNING_RATE_SCHEDULE] == name_of(kind));
        for difference in Difference::between(&before.options, &identity.changeable) {
            log::info!("from now on: {difference}");
            if difference.name == STEPS_IN_ALL && by_length {
                log::warn!("the learning rate follows the schedule of the new number of steps from here on");
            }
        }
        if options.init.is_some() {
            log::info!("--init has no effect, because this run resumes from {path}");
        }
        let is_in_checkpoint_dir =
            options.checkpoint_dir.as_deref().is_some_and(|path| lies_in(&checkpoint, path));
        Ok(Start::Resumed { checkpoint, is_in_checkpoint_dir })
    }

    fn with_weights(init: Option<&Path>, model: &Model, identity: &Identity) -> Result<Start> {
        let Some(init) = init else { return Ok(Start::Anew) };
        let weights = Checkpoint::open_weights(init)?;
        check_tokens(&weights, identity)?;
        check_tensors(&weights, model)?;
        check_finite(&weights, model)?;
        let path = weights.path.display();
        match weights.is_sealed() {
            true => log::info!("starting with the weights of {path}"),
            false => log::warn!("starting with the weights of {path}, which has no checksums"),
        }
        Ok(Start::Weights(weights))
    }

    fn file(&self) -> Option<&Checkpoint> {
        match self {
            Start::Anew => None,
            Start::Weights(file) | Start::Resumed { checkpoint: file, .. } => Some(file),
        }
    }

    /// Returns true if the run starts with the tensors of a file.
    pub(super) fn has_file(&self) -> bool {
        self.file().is_some()
    }

    /// Returns the number of leaves of the sums of the run that is resumed, if there is one and its
    /// sums are canonical.
    pub(super) fn num_leaves(&self) -> Option<i64> {
        let Start::Resumed { checkpoint, .. } = self else { return None };
        checkpoint.description.config.get(LEAVES)?.as_i64()
    }

    fn resumed(&self) -> Option<Resumed> {
        let Start::Resumed { checkpoint, is_in_checkpoint_dir } = self else { return None };
        let Description { step, loss, .. } = checkpoint.description;
        Some(Resumed { position: RunPosition { step, loss }, is_in_checkpoint_dir: *is_in_checkpoint_dir })
    }
}

/// Gives all ranks the tensors of the file that rank 0 has found, one after the other, and returns
/// the checkpoint from which the run is resumed, if it is one. Collective.
///
/// # Errors
/// The file was damaged or disappeared after it was checked (rank 0 alone).
pub(super) fn restore<D: Device>(
    all: &Communicator,
    model: &Model,
    start: Option<Start>,
    trainer: &mut Trainer<'_, D>,
) -> Result<Option<Resumed>> {
    let file = start.as_ref().and_then(Start::file);
    let resumed = start.as_ref().and_then(Start::resumed);
    let slots = trainer.slot_names().iter().copied().map(Some);
    let groups: Vec<String> = std::iter::once(None).chain(slots).map(group_name).collect();
    let mut words = resumed.map_or([0; Resumed::NUM_WORDS], Resumed::to_words);
    all.broadcast(&mut words, 0)?;
    // a new run takes the first group, the parameters, alone
    let takes = |(number, group): (usize, &String)| {
        i64::from((number == 0 || resumed.is_some()) && file.is_some_and(|file| file.has_group(group)))
    };
    let mut taken: Vec<i64> = groups.iter().enumerate().map(takes).collect();
    all.broadcast(&mut taken, 0)?;
    for (index, group) in groups.iter().enumerate().filter(|(index, _)| taken[*index] == 1) {
        for (number, spec) in model.tensors.iter().enumerate() {
            let mut values = match file {
                Some(file) => file.read(group, &spec.name, &spec.shape)?,
                None => vec![0.0; spec.num_elements()],
            };
            all.broadcast(&mut values, 0)?;
            trainer.write_part(index.checked_sub(1), number, &values)?;
        }
    }
    Ok(Resumed::from_words(words))
}

/// Returns the newest sound checkpoint of `directory` that `accept` does not refuse, and logs a
/// warning for each newer one. The error where all are damaged ends with `way_out`.
fn newest_in(
    directory: &Path,
    accept: &dyn Fn(&Checkpoint) -> Result<()>,
    way_out: &str,
) -> Result<Option<Checkpoint>> {
    let found = checkpoint::newest_acceptable(directory, accept)?;
    for error in &found.damaged {
        log::warn!("{error}");
    }
    if found.checkpoint.is_none() && !found.damaged.is_empty() {
        let why = format!("none of its {} checkpoints is sound; {way_out}", found.damaged.len());
        return Err(Error::input(format!("resuming from {}", directory.display()), why));
    }
    Ok(found.checkpoint)
}

/// Refuses a directory with checkpoints of other runs, or newer ones than `start`: later starts
/// resume from the newest checkpoint of the directory, and the oldest ones are removed.
fn refuse_others(directory: &Path, resume: &Resume, start: Option<&Checkpoint>) -> Result<()> {
    // --resume names the directory itself, and with it its newest checkpoint
    let is_directory = |path: &Path| path.canonicalize().ok() == directory.canonicalize().ok();
    if matches!(resume, Resume::From(path) if path.is_dir() && is_directory(path)) {
        return Ok(());
    }
    let mut found = checkpoint::list(directory)?;
    let at_home = start.filter(|start| lies_in(start, directory));
    if let Some(start) = at_home {
        // later starts pass over damaged files too
        found.retain(|(step, path)| *step > start.description.step && Checkpoint::open(path).is_ok());
    }
    let Some((newest, _)) = found.pop() else { return Ok(()) };
    let why = match at_home {
        None if start.is_some() => {
            format!(
                "it holds a checkpoint of step {newest}, of this run or another; give a new directory, or \
                 --resume auto to resume from it"
            )
        }
        _ => format!(
            "it holds a checkpoint of step {newest} already, from which the next start would resume; \
             --resume auto does so now, another directory begins anew"
        ),
    };
    Err(Error::input(format!("--checkpoint-dir {}", directory.display()), why))
}

/// Returns true if `checkpoint` has the name and the place that a run with this --checkpoint-dir
/// would have given it.
fn lies_in(checkpoint: &Checkpoint, directory: &Path) -> bool {
    let home = directory.join(checkpoint::file_name(checkpoint.description.step)).canonicalize().ok();
    home.is_some() && checkpoint.path.canonicalize().ok() == home
}

/// Refuses a file that lacks one of the optimizer's `slots`, except the momentum of SGD if the run
/// had none before.
fn check_slots(file: &Checkpoint, slots: &[&str]) -> Result<()> {
    let had_none = file.description.options.get(MOMENTUM).is_some_and(|momentum| momentum == 0.0);
    match slots.iter().find(|slot| !file.has_group(&group_name(Some(slot)))) {
        Some(&"momentum_buffer") if had_none => Ok(()),
        Some(slot) => {
            let why =
                format!("it has no /optimizer/{slot}: it holds weights alone, and --init starts with those");
            Err(Error::input(format!("resuming from {}", file.path.display()), why))
        }
        None => Ok(()),
    }
}

/// Refuses weights for other tokens than those of the data: rows of the embedding would be taken for those of
/// other characters. A file that does not name its tokens is accepted, and so are as many tokens as numbers,
/// which may stand for the same.
fn check_tokens(file: &Checkpoint, identity: &Identity) -> Result<()> {
    let tokens = |settings: &Settings| settings.get(TOKENS_SETTING)?.as_str().and_then(Tokeniser::from_text);
    let (Some(before), Some(now)) = (tokens(&file.description.config), tokens(&identity.config)) else {
        return Ok(());
    };
    let Some(difference) = now.difference_of(&before) else { return Ok(()) };
    let are_numbers = [&before, &now].iter().any(|tokens| matches!(tokens, Tokeniser::Numbers(_)));
    if are_numbers && before.vocabulary() == now.vocabulary() {
        log::warn!("--init has the right tokens only if they stand for those of --data: {difference}");
        return Ok(());
    }
    let why = format!(
        "its tokens are not those of --data: {difference}; train on a text with the same characters, or both \
         with --tokens bytes"
    );
    Err(Error::input(format!("--init {}", file.path.display()), why))
}

/// Refuses weights that are NaN or infinite: training would fail at its first step, with a message
/// about the learning rate.
fn check_finite(file: &Checkpoint, model: &Model) -> Result<()> {
    for spec in &model.tensors {
        let values = file.read(&group_name(None), &spec.name, &spec.shape)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let why = format!(
                "/model/{} holds {} (element {at}); every weight must be a finite number",
                spec.name, values[at]
            );
            return Err(Error::input(format!("--init {}", file.path.display()), why));
        }
    }
    Ok(())
}

/// Refuses a file whose tensors are not those of `model`.
fn check_tensors(file: &Checkpoint, model: &Model) -> Result<()> {
    let fail =
        |why: String| Err(Error::input(format!("fitting {} to {}", file.path.display(), model.name), why));
    let in_file = |name: &str| file.parameters().find(|tensor| tensor.name == name);
    for spec in &model.tensors {
        match in_file(&spec.name) {
            None => return fail(format!("it has no tensor /model/{}", spec.name)),
            Some(found) if found.shape != spec.shape => {
                return fail(format!(
                    "/model/{} has the shape {:?}, and {:?} is wanted",
                    spec.name, found.shape, spec.shape
                ));
            }
            Some(_) => {}
        }
    }
    let wanted = |name: &str| model.tensors.iter().any(|spec| spec.name == name);
    match file.parameters().find(|tensor| !wanted(&tensor.name)) {
        Some(extra) => fail(format!("it has a tensor /model/{}, which the model does not have", extra.name)),
        None => Ok(()),
    }
}
