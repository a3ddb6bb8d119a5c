//! The rank whose work each rank repeats.

use crate::Result;
use crate::comm::{Communicator, Grid, GridShape};

/// A permutation of the ranks: rank r plays the part of another. All ranks move along one axis by the
/// same distance, so that those that exchange messages in a step do so when they repeat it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Roles {
    shape: GridShape,
    /// The distances along the axes; at most one is not 0.
    shift: GridShape,
}

/// Returns true if a rank of a grid of `shape` keeps a copy of the parameters of the part that it plays. They
/// are another rank's if there are no replicas. One of three replicas or more, which do not keep them
/// `in_parts`, decides with its copy between two others.
pub(super) fn keeps_copy(shape: GridShape, in_parts: bool) -> bool {
    match shape.data {
        1 => shape.stage * shape.tensor > 1,
        2 => false,
        _ => !in_parts,
    }
}

impl Roles {
    /// Chooses the parts: of another replica if there are several, whose parameters are equal; else of
    /// another stage, else of another rank of the tensor axis. Of all distances, the one that leads the
    /// most ranks to another node, where `node` is that of a rank.
    pub fn new(shape: GridShape, node: impl Fn(usize) -> usize) -> Roles {
        let still = GridShape { data: 0, stage: 0, tensor: 0 };
        let shifts: Vec<GridShape> = match shape {
            GridShape { data: 2.., .. } => (1..shape.data).map(|data| GridShape { data, ..still }).collect(),
            GridShape { stage: 2.., .. } => {
                (1..shape.stage).map(|stage| GridShape { stage, ..still }).collect()
            }
            _ => (1..shape.tensor).map(|tensor| GridShape { tensor, ..still }).collect(),
        };
        let num_ranks = shape.data * shape.stage * shape.tensor;
        let num_elsewhere =
            |roles: &Roles| (0..num_ranks).filter(|rank| node(roles.role_of(*rank)) != node(*rank)).count();
        let all = shifts.into_iter().map(|shift| Roles { shape, shift });
        // the first of the best
        let best = all.rev().max_by_key(num_elsewhere);
        best.unwrap_or(Roles { shape, shift: still })
    }

    /// Returns the rank whose part `rank` plays.
    pub fn role_of(&self, rank: usize) -> usize {
        self.moved(rank, |at, shift, size| (at + shift) % size)
    }

    /// Returns the rank that plays the part of `rank`.
    pub fn auditor_of(&self, rank: usize) -> usize {
        self.moved(rank, |at, shift, size| (at + size - shift) % size)
    }

    /// Returns a third rank with the same parameters as `rank` and its auditor, if there is one.
    pub fn third(&self, rank: usize) -> Option<usize> {
        let (data, stage, tensor) = self.shape.coordinates(rank);
        let others = (1..self.shape.data).map(|more| (data + more) % self.shape.data);
        let mut ranks = others.map(|data| self.shape.rank(data, stage, tensor));
        ranks.find(|other| self.are_replicas() && *other != self.auditor_of(rank))
    }

    /// Returns parts that ranks can play besides these, if they have no replicas and there are enough.
    pub fn another(&self) -> Option<Roles> {
        let Roles { shape, shift } = *self;
        let still = GridShape { data: 0, stage: 0, tensor: 0 };
        let stages = (1..shape.stage).map(|stage| GridShape { stage, ..still });
        let tensors = (1..shape.tensor).map(|tensor| GridShape { tensor, ..still });
        let other = stages.chain(tensors).find(|other| shift.data == 0 && *other != shift);
        other.map(|shift| Roles { shape, shift })
    }

    /// Returns the rank whose work each rank repeats, in words.
    pub fn words(&self) -> &'static str {
        match self.shift {
            GridShape { data: 1.., .. } => "a leaf of another replica",
            GridShape { stage: 1.., .. } => "a leaf of another stage, with parameters that it is sent",
            GridShape { tensor: 1.., .. } => {
                "a leaf of another rank of the tensor axis, with parameters that it is sent"
            }
            _ => "a leaf of its own, which finds transient faults only, because there is no other rank",
        }
    }

    /// Returns the ranks that share layers, in the order of their parts. Collective.
    ///
    /// # Errors
    /// None but those of a split.
    pub fn tensors(&self, grid: &Grid, tensors: &Communicator) -> Result<Communicator> {
        match self.shift.tensor {
            0 => Ok(tensors.clone()),
            _ => grid.tensor.split(0, self.shape.coordinates(self.role_of(grid.all.rank())).2),
        }
    }

    /// Returns true if every rank has the parameters of its part, as a replica.
    pub fn are_replicas(&self) -> bool {
        self.shift.data > 0
    }

    /// Returns true if every rank plays its own part.
    pub fn are_own(&self) -> bool {
        self.role_of(0) == 0
    }

    fn moved(&self, rank: usize, along: impl Fn(usize, usize, usize) -> usize) -> usize {
        let Roles { shape, shift } = self;
        let (data, stage, tensor) = shape.coordinates(rank);
        shape.rank(
            along(data, shift.data, shape.data),
            along(stage, shift.stage, shape.stage),
            along(tensor, shift.tensor, shape.tensor),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_played_once_by_another_rank() {
        for (data, stage, tensor) in
            [(1, 1, 1), (2, 1, 1), (3, 2, 2), (1, 3, 2), (1, 2, 2), (1, 1, 4), (5, 1, 1)]
        {
            let shape = GridShape { data, stage, tensor };
            let num_ranks = data * stage * tensor;
            let roles = Roles::new(shape, |_| 0);
            let mut played = vec![0; num_ranks];
            for rank in 0..num_ranks {
                let role = roles.role_of(rank);
                played[role] += 1;
                assert_eq!(roles.auditor_of(role), rank);
                assert!(role != rank || num_ranks == 1);
                let third = roles.third(rank);
                assert_eq!(third.is_some(), data > 2, "{shape:?}");
                assert!(third.is_none_or(|third| third != rank && third != roles.auditor_of(rank)));
            }
            assert_eq!(played, vec![1; num_ranks]);
            assert_eq!(roles.are_replicas(), data > 1);
            assert_eq!(roles.another().is_some(), data == 1 && num_ranks > 2);
            if let Some(another) = roles.another() {
                assert!((0..num_ranks).all(|rank| another.role_of(rank) != roles.role_of(rank)));
                assert!((0..num_ranks).all(|rank| another.role_of(rank) != rank));
            }
        }
    }

    #[test]
    fn another_node_comes_first() {
        // four replicas on two nodes
        let roles = Roles::new(GridShape::data(4), |rank| rank / 2);
        assert!((0..4).all(|rank| roles.role_of(rank) / 2 != rank / 2), "{roles:?}");
    }
}
