//! The node of each rank of the job.

use std::sync::OnceLock;

/// The first rank on the node of each rank of the job, which names the node.
static NODES: OnceLock<Vec<usize>> = OnceLock::new();

/// Sets the nodes of all ranks of the job, once.
pub(super) fn set_nodes(leaders: Vec<usize>) {
    NODES.get_or_init(|| leaders);
}

/// Returns the node of a rank of the job, named by its first rank.
pub(super) fn node_of(rank: usize) -> usize {
    NODES.get().and_then(|nodes| nodes.get(rank)).copied().unwrap_or_default()
}
