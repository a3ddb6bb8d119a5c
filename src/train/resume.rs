//! Where a run begins: at a checkpoint, with given weights, or from nothing. Rank 0 looks, all ranks agree.

use std::path::Path;

use super::checkpoint_options::{CheckpointOptions, Resume};
use super::trainer::Trainer;
use crate::checkpoint::{self, Checkpoint, Difference, Settings};
use crate::comm::{Buffer, Communicator};
use crate::device::Device;
use crate::nn::Model;
use crate::{Error, Result};

/// What a run begins with, on rank 0.
pub(super) struct Start {
    checkpoint: Option<Checkpoint>,
    /// Only the weights count.
    weights_only: bool,
}

impl Start {
    /// Finds what `options` ask for, and refuses what does not belong to a run of `model` with `config`. Not collective.
    ///
    /// # Errors
    /// It is missing, damaged, or of another run; the directory holds checkpoints that would be mistaken for this run's.
    pub(super) fn find(
        options: &CheckpointOptions,
        model: &Model,
        (config, changeable): (&Settings, &Settings),
    ) -> Result<Start> {
        let checkpoint = match &options.resume {
            Resume::Never => None,
            Resume::Auto => options.checkpoint_dir.as_deref().map(newest_in).transpose()?.flatten(),
            Resume::From(path) if path.is_dir() => Some(newest_in(path)?.ok_or_else(|| {
                Error::input(format!("--resume {}", path.display()), "the directory holds no checkpoint")
            })?),
            Resume::From(path) => Some(Checkpoint::open(path)?),
        };
        if let Some(directory) = options.checkpoint_dir.as_deref().filter(|_| options.resume != Resume::Auto) {
            refuse_newer(directory, checkpoint.as_ref())?;
        }
        if let Some(checkpoint) = checkpoint {
            let path = checkpoint.path.display();
            let before = &checkpoint.description;
            let differences = Difference::between(&before.config, config);
            if !differences.is_empty() {
                let words: Vec<String> = differences.iter().map(ToString::to_string).collect();
                let why = format!(
                    "it belongs to another run: {}; give what it was, or another --checkpoint-dir",
                    words.join("; ")
                );
                return Err(Error::input(format!("going on from {path}"), why));
            }
            for difference in Difference::between(&before.options, changeable) {
                log::info!("from now on: {difference}");
            }
            check_tensors(&checkpoint, model)?;
            if options.init.is_some() {
                log::info!("--init is for the beginning; this run goes on from {path}");
            }
            return Ok(Start { checkpoint: Some(checkpoint), weights_only: false });
        }
        let weights = options.init.as_deref().map(Checkpoint::open_weights).transpose()?;
        if let Some(weights) = &weights {
            check_tensors(weights, model)?;
            let path = weights.path.display();
            match weights.is_sealed() {
                true => log::info!("starting with the weights of {path}"),
                false => log::warn!("starting with the weights of {path}, which has no checksums"),
            }
        }
        Ok(Start { checkpoint: weights, weights_only: true })
    }

    /// Steps that have been done.
    pub(super) fn step(&self) -> Option<u64> {
        self.checkpoint.as_ref().filter(|_| !self.weights_only).map(|checkpoint| checkpoint.description.step)
    }
}

/// Brings what rank 0 has found to all ranks, tensor by tensor, and returns the steps that have been done. Collective.
///
/// # Errors
/// The file was damaged or disappeared after it was checked (rank 0 alone).
pub(super) fn restore<D: Device<Buffer: Buffer<f32>>>(
    all: &Communicator,
    model: &Model,
    start: Option<Start>,
    trainer: &mut Trainer<'_, D>,
) -> Result<Option<u64>> {
    let file = start.as_ref().and_then(|start| start.checkpoint.as_ref());
    let weights_only = start.as_ref().is_none_or(|start| start.weights_only);
    let has = |group: &str| file.is_some_and(|file| file.tensors.iter().any(|tensor| tensor.group == group));
    let groups: Vec<String> = std::iter::once("model".to_owned())
        .chain(trainer.slot_names().iter().map(|slot| format!("optimizer/{slot}")))
        .collect();
    // whether there is a step, which, and which of the groups the file has
    let mut head = vec![0_i64; 2 + groups.len()];
    if let Some(step) = start.as_ref().and_then(Start::step) {
        head[..2].copy_from_slice(&[1, step as i64]);
    }
    for (index, group) in groups.iter().enumerate() {
        head[2 + index] = i64::from(has(group) && (index == 0 || !weights_only));
    }
    all.broadcast(&mut head, 0)?;
    for (index, group) in groups.iter().enumerate().filter(|(index, _)| head[2 + index] == 1) {
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
    Ok((head[0] == 1).then_some(head[1] as u64))
}

/// The newest sound checkpoint of `directory`, with a warning for each newer one that is damaged.
fn newest_in(directory: &Path) -> Result<Option<Checkpoint>> {
    let found = checkpoint::newest_sound(directory)?;
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

/// Later starts go on from the newest checkpoint of the directory, so there must be none that is newer than where this run
/// begins.
fn refuse_newer(directory: &Path, start: Option<&Checkpoint>) -> Result<()> {
    let newest = checkpoint::list(directory)?.last().map(|(step, _)| *step);
    let Some(newest) = newest.filter(|newest| start.is_none_or(|start| start.description.step < *newest)) else {
        return Ok(());
    };
    let why = format!(
        "it holds a checkpoint of step {newest} already, from which the next start would go on; --resume auto does so now, another directory begins anew"
    );
    Err(Error::input(format!("--checkpoint-dir {}", directory.display()), why))
}

fn check_tensors(file: &Checkpoint, model: &Model) -> Result<()> {
    let fail = |why: String| Err(Error::input(format!("fitting {} to {}", file.path.display(), model.name), why));
    let in_file = |name: &str| file.tensors.iter().find(|tensor| tensor.group == "model" && tensor.name == name);
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
