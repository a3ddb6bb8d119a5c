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

/// Returns the number of ranks of each of the `nodes` of a group's ranks, if that is the same and the ranks
/// of a node follow each other.
pub(super) fn ranks_per_node(nodes: &[usize]) -> Option<usize> {
    let each = nodes.iter().take_while(|node| **node == nodes[0]).count();
    let mut groups: Vec<&[usize]> = nodes.chunks(each.max(1)).collect();
    let is_whole = |group: &&[usize]| group.len() == each && group.iter().all(|node| *node == group[0]);
    let are_whole = groups.iter().all(is_whole);
    let num_groups = groups.len();
    groups.sort_unstable();
    groups.dedup();
    (are_whole && groups.len() == num_groups).then_some(each)
}

#[cfg(test)]
mod tests {
    use super::ranks_per_node;

    #[test]
    fn equal_runs_of_ranks_are_counted() {
        assert_eq!(ranks_per_node(&[4, 4, 4]), Some(3));
        assert_eq!(ranks_per_node(&[0, 1, 2]), Some(1));
        assert_eq!(ranks_per_node(&[0, 0, 2, 2, 4, 4]), Some(2));
        for uneven in [&[0, 0, 2][..], &[0, 1, 1, 1], &[0, 1, 0, 1], &[0, 0, 2, 2, 0, 0], &[0, 0, 2, 3]] {
            assert_eq!(ranks_per_node(uneven), None, "{uneven:?}");
        }
    }
}
