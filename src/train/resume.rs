//! Where a run begins: at a checkpoint, with given weights, or from nothing. Rank 0 looks, all ranks agree.

use std::path::Path;

use super::checkpoint_options::{CheckpointOptions, Resume};
use super::trainer::Trainer;
use crate::checkpoint::{self, Checkpoint, Description, Difference, Settings};
use crate::comm::Communicator;
use crate::device::Device;
use crate::nn::Model;
use crate::{Error, Result};

/// What a run begins with, on rank 0.
pub(super) struct Start {
    checkpoint: Option<Checkpoint>,
    /// Only the weights count.
    weights_only: bool,
    /// The checkpoint lies where this run writes its own.
    is_at_home: bool,
}

/// What a run goes on after.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Resumed {
    /// The steps that have been done.
    pub(super) step: u64,
    /// The loss of the last of them, if the file says it.
    pub(super) loss: Option<f64>,
    /// The checkpoint lies where this run writes its own.
    pub(super) is_at_home: bool,
}

impl Start {
    /// Finds what `options` ask for, and refuses what does not belong to a run of `model` with `config`, whose optimizer keeps
    /// `slots`. Not collective.
    ///
    /// # Errors
    /// It is missing, damaged, or of another run; the directory holds checkpoints that would be mistaken for this run's.
    pub(super) fn find(
        options: &CheckpointOptions,
        model: &Model,
        slots: &[&str],
        (config, changeable): (&Settings, &Settings),
    ) -> Result<Start> {
        for (option, path) in options.inputs() {
            if let Err(error) = std::fs::metadata(path) {
                return Err(Error::input(format!("{option} {}", path.display()), error));
            }
        }
        // weights alone under the name of a checkpoint are none, and the one before will do; of another run slots are no matter
        let is_of_this_run = |file: &Checkpoint| {
            let before = &file.description.config;
            ["--model", "--optimizer"].iter().all(|name| before.get(*name) == config.get(*name))
        };
        let accept = |file: &Checkpoint| if is_of_this_run(file) { check_slots(file, slots) } else { Ok(()) };
        let newest_in = |directory: &Path| newest_in(directory, &accept);
        let checkpoint = match &options.resume {
            Resume::Never => None,
            Resume::Auto => options.checkpoint_dir.as_deref().map(newest_in).transpose()?.flatten(),
            Resume::From(path) if path.is_dir() => Some(newest_in(path)?.ok_or_else(|| {
                Error::input(format!("--resume {}", path.display()), "the directory holds no checkpoint")
            })?),
            Resume::From(path) => Some(Checkpoint::open(path)?),
        };
        if let Some(directory) = options.checkpoint_dir.as_deref().filter(|_| options.resume != Resume::Auto)
        {
            refuse_others(directory, &options.resume, checkpoint.as_ref())?;
        }
        if let Some(checkpoint) = checkpoint {
            let path = checkpoint.path.display();
            let before = &checkpoint.description;
            accept(&checkpoint)?;
            let differences = Difference::between(&before.config, config);
            if !differences.is_empty() {
                let words: Vec<String> = differences.iter().map(ToString::to_string).collect();
                let why = format!(
                    "it belongs to another run: {}; give what it was, or another --checkpoint-dir",
                    words.join("; ")
                );
                return Err(Error::input(format!("going on from {path}"), why));
            }
            check_tensors(&checkpoint, model)?;
            let by_length =
                ["cosine", "linear"].iter().any(|kind| changeable["--learning-rate-schedule"] == *kind);
            for difference in Difference::between(&before.options, changeable) {
                log::info!("from now on: {difference}");
                if difference.name == "steps in all" && by_length {
                    log::warn!(
                        "the learning rate follows the schedule of the new number of steps from here on"
                    );
                }
            }
            if options.init.is_some() {
                log::info!("--init is for the beginning; this run goes on from {path}");
            }
            let is_at_home = options.checkpoint_dir.as_deref().is_some_and(|path| lies_in(&checkpoint, path));
            return Ok(Start { checkpoint: Some(checkpoint), weights_only: false, is_at_home });
        }
        let weights = options.init.as_deref().map(Checkpoint::open_weights).transpose()?;
        if let Some(weights) = &weights {
            check_tensors(weights, model)?;
            check_finite(weights, model)?;
            let path = weights.path.display();
            match weights.is_sealed() {
                true => log::info!("starting with the weights of {path}"),
                false => log::warn!("starting with the weights of {path}, which has no checksums"),
            }
        }
        Ok(Start { checkpoint: weights, weights_only: true, is_at_home: false })
    }

    fn resumed(&self) -> Option<Resumed> {
        let checkpoint = self.checkpoint.as_ref().filter(|_| !self.weights_only)?;
        let Description { step, loss, .. } = checkpoint.description;
        Some(Resumed { step, loss, is_at_home: self.is_at_home })
    }
}

/// Brings what rank 0 has found to all ranks, tensor by tensor, and returns what the run goes on after. Collective.
///
/// # Errors
/// The file was damaged or disappeared after it was checked (rank 0 alone).
pub(super) fn restore<D: Device>(
    all: &Communicator,
    model: &Model,
    start: Option<Start>,
    trainer: &mut Trainer<'_, D>,
) -> Result<Option<Resumed>> {
    let file = start.as_ref().and_then(|start| start.checkpoint.as_ref());
    let weights_only = start.as_ref().is_none_or(|start| start.weights_only);
    let slots = trainer.slot_names().iter().copied().map(Some);
    let groups: Vec<String> = std::iter::once(None).chain(slots).map(checkpoint::group_name).collect();
    // whether there is a step, which, of whose directory, its loss, and which of the groups the file has
    let mut head = vec![0_i64; 5 + groups.len()];
    if let Some(Resumed { step, loss, is_at_home }) = start.as_ref().and_then(Start::resumed) {
        let bits = loss.unwrap_or_default().to_bits() as i64;
        head[..5].copy_from_slice(&[1, step as i64, i64::from(is_at_home), i64::from(loss.is_some()), bits]);
    }
    for (index, group) in groups.iter().enumerate() {
        head[5 + index] =
            i64::from(file.is_some_and(|file| file.has_group(group)) && (index == 0 || !weights_only));
    }
    all.broadcast(&mut head, 0)?;
    for (index, group) in groups.iter().enumerate().filter(|(index, _)| head[5 + index] == 1) {
        for (number, spec) in model.tensors.iter().enumerate() {
            let mut values = match file {
                Some(file) => file.read(group, &spec.name, &spec.shape)?,
                None => vec![0.0; spec.num_elements()],
            };
            all.broadcast(&mut values, 0)?;
            match index.checked_sub(1) {
                None => trainer.set_tensor(number, &values)?,
                Some(slot) => trainer.set_slot(slot, number, &values)?,
            }
        }
    }
    let loss = (head[3] == 1).then(|| f64::from_bits(head[4] as u64));
    Ok((head[0] == 1).then_some(Resumed { step: head[1] as u64, loss, is_at_home: head[2] == 1 }))
}

/// The newest sound checkpoint of `directory` that `accept` does not refuse, with a warning for each newer one.
fn newest_in(directory: &Path, accept: &dyn Fn(&Checkpoint) -> Result<()>) -> Result<Option<Checkpoint>> {
    let found = checkpoint::newest_acceptable(directory, accept)?;
    for error in &found.damaged {
        log::warn!("{error}");
    }
    if found.checkpoint.is_none() && !found.damaged.is_empty() {
        let why = format!(
            "none of its {} checkpoints is sound; to begin anew, give another --checkpoint-dir",
            found.damaged.len()
        );
        return Err(Error::input(format!("going on from {}", directory.display()), why));
    }
    Ok(found.checkpoint)
}

/// Later starts go on from the newest checkpoint of the directory, and of one that is full old ones are removed. So it must hold
/// nothing but this run's, and nothing that is newer than where this begins.
fn refuse_others(directory: &Path, resume: &Resume, start: Option<&Checkpoint>) -> Result<()> {
    // the newest sound one there, as without this option
    let is_directory = |path: &Path| path.canonicalize().ok() == directory.canonicalize().ok();
    if matches!(resume, Resume::From(path) if path.is_dir() && is_directory(path)) {
        return Ok(());
    }
    let Some((newest, _)) = checkpoint::list(directory)?.pop() else { return Ok(()) };
    let why = match start.filter(|start| lies_in(start, directory)) {
        Some(start) if start.description.step == newest => return Ok(()),
        None if start.is_some() => {
            format!(
                "it holds a checkpoint of step {newest}, of this run or another; give a new directory, or --resume auto to go on from that"
            )
        }
        _ => format!(
            "it holds a checkpoint of step {newest} already, from which the next start would go on; --resume auto does so now, another directory begins anew"
        ),
    };
    Err(Error::input(format!("--checkpoint-dir {}", directory.display()), why))
}

/// True if `checkpoint` has the name and the place that a run with this --checkpoint-dir would have given it.
fn lies_in(checkpoint: &Checkpoint, directory: &Path) -> bool {
    let home = directory.join(checkpoint::file_name(checkpoint.description.step)).canonicalize().ok();
    home.is_some() && checkpoint.path.canonicalize().ok() == home
}

/// Refuses a file that lacks what the optimizer kept, but for SGD that gets a momentum now.
fn check_slots(file: &Checkpoint, slots: &[&str]) -> Result<()> {
    let had_none = file.description.options.get("--momentum").is_some_and(|momentum| momentum == 0.0);
    match slots.iter().find(|slot| !file.has_group(&checkpoint::group_name(Some(slot)))) {
        Some(&"momentum_buffer") if had_none => Ok(()),
        Some(slot) => {
            let why =
                format!("it has no /optimizer/{slot}: it holds weights alone, and --init starts with those");
            Err(Error::input(format!("going on from {}", file.path.display()), why))
        }
        None => Ok(()),
    }
}

/// Refuses weights that are no finite numbers: training would fail at its first step, and the learning rate would be blamed.
fn check_finite(file: &Checkpoint, model: &Model) -> Result<()> {
    for spec in &model.tensors {
        let values = file.read("model", &spec.name, &spec.shape)?;
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

fn check_tensors(file: &Checkpoint, model: &Model) -> Result<()> {
    let fail =
        |why: String| Err(Error::input(format!("fitting {} to {}", file.path.display(), model.name), why));
    let in_file =
        |name: &str| file.tensors.iter().find(|tensor| tensor.group == "model" && tensor.name == name);
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
    match file.tensors.iter().find(|tensor| tensor.group == "model" && !wanted(&tensor.name)) {
        Some(extra) => fail(format!("it has a tensor /model/{}, which the model has not", extra.name)),
        None => Ok(()),
    }
}
