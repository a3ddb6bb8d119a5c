//! The order of the training samples, where `--shuffle on` leaves it to the nodes' memory.

use super::identity::SHUFFLE;
use super::options::{CheckpointOptions, DataOptions, Resume, Shuffle, TrainOptions, name_of};
use crate::Result;
use crate::checkpoint::{self, Checkpoint};
use crate::comm::Communicator;
use crate::trace::{self, Name};

/// Returns the order that `options` ask for. Where it would follow the memory of the nodes, this is the order
/// of the run that is resumed, because the nodes of another start may have more memory or less. Collective.
///
/// # Errors
/// None but those of an all-reduce: a checkpoint that cannot be read is refused later.
pub(super) fn choose(all: &Communicator, options: &TrainOptions) -> Result<Shuffle> {
    if options.data.shuffle != Shuffle::On {
        return Ok(options.data.shuffle);
    }
    // rank 0 alone looks at --data, which may differ between ranks: they compare it when they open it
    let follows_memory = all.is_root() && DataOptions::is_of_file(options.source());
    let before = if follows_memory { recorded(&options.checkpoints) } else { None };
    for order in [Shuffle::Full, Shuffle::Blocks] {
        if all.any_rank(before == Some(order))? {
            return Ok(order);
        }
    }
    Ok(Shuffle::On)
}

/// Returns the order of the samples in the checkpoint that `options` resume, if there is one. Not collective.
fn recorded(options: &CheckpointOptions) -> Option<Shuffle> {
    let _span = trace::work(Name::Read);
    let newest = |directory| checkpoint::newest_sound(directory).ok()?.checkpoint;
    let checkpoint = match (&options.resume, &options.checkpoint_dir) {
        (Resume::Never, _) | (Resume::Auto, None) => None,
        (Resume::From(path), _) if path.is_file() => Checkpoint::open(path).ok(),
        (Resume::From(directory), _) | (Resume::Auto, Some(directory)) => newest(directory),
    }?;
    let order = checkpoint.description.config.get(SHUFFLE);
    // a checkpoint of fully mixed samples does not name their order
    let by_blocks = order.is_some_and(|order| *order == name_of(&Shuffle::Blocks));
    Some(if by_blocks { Shuffle::Blocks } else { Shuffle::Full })
}
