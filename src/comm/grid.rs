//! The world as a grid of data × stage × tensor ranks.

use super::nodes::node_of;
use super::{Communicator, World};
use crate::{Error, Result};

/// The numbers of ranks along each axis; their product is the size of the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridShape {
    /// The number of replicas of the model, each with its own share of every batch.
    pub data: usize,
    /// The number of stages of a pipeline, each with some of the layers.
    pub stage: usize,
    /// The number of ranks that share the layers of one stage of one replica.
    pub tensor: usize,
}

impl GridShape {
    /// Makes every rank a replica.
    pub fn data(size: usize) -> GridShape {
        GridShape { data: size, stage: 1, tensor: 1 }
    }

    /// Returns the coordinates of rank `rank` of the world, `(data, stage, tensor)`: tensor is
    /// fastest, then stage.
    pub fn coordinates(&self, rank: usize) -> (usize, usize, usize) {
        (rank / self.tensor / self.stage, rank / self.tensor % self.stage, rank % self.tensor)
    }

    /// Returns the rank of the world at these coordinates: the inverse of
    /// [`GridShape::coordinates`].
    pub fn rank(&self, data: usize, stage: usize, tensor: usize) -> usize {
        (data * self.stage + stage) * self.tensor + tensor
    }

    fn check(&self, world: usize) -> Result<()> {
        let GridShape { data, stage, tensor } = self;
        if data * stage * tensor == world && world > 0 {
            return Ok(());
        }
        let product = data * stage * tensor;
        let why = format!(
            "data {data} × stage {stage} × tensor {tensor} = {product} ranks, but the job has {world}"
        );
        Err(Error::input("laying out the grid", why))
    }
}

/// A rank's communicators: of everyone, and of the ranks that differ from it along one axis only.
pub struct Grid {
    /// The shape of the grid.
    pub shape: GridShape,
    /// All ranks, as they are numbered in the world.
    pub all: Communicator,
    /// The replicas of this rank's part of the model.
    pub data: Communicator,
    /// The stages of this rank's replica.
    pub stage: Communicator,
    /// The ranks that share this rank's layers; neighbours in the world, so that they share a node.
    pub tensor: Communicator,
}

impl Grid {
    /// Splits the world. Collective.
    ///
    /// # Errors
    /// The product of the axes is not the size of the world.
    pub fn new(world: &World, shape: GridShape) -> Result<Grid> {
        shape.check(world.size())?;
        let (data, stage, tensor) = shape.coordinates(world.rank());
        let all = world.communicator();
        Ok(Grid {
            shape,
            all: all.duplicate(),
            data: all.split(stage * shape.tensor + tensor, data)?,
            stage: all.split(data * shape.tensor + tensor, stage)?,
            tensor: all.split(data * shape.stage + stage, tensor)?,
        })
    }

    /// Returns the first two ranks of the world that share layers but not a node, each with the
    /// name of its node, or `None` if every tensor axis stays within a node. Collective.
    ///
    /// # Errors
    /// None but those of a broadcast.
    pub fn tensor_axis_between_nodes(&self, world: &World) -> Result<Option<[(usize, String); 2]>> {
        let first_of = |rank: usize| rank - rank % self.shape.tensor;
        let crosses = |rank: &usize| node_of(*rank) != node_of(first_of(*rank));
        let Some(second) = (0..world.size()).find(crosses) else { return Ok(None) };
        let name = |rank| -> Result<(usize, String)> {
            let bytes = self.all.broadcast_bytes(world.host_name().into_bytes(), rank)?;
            Ok((rank, String::from_utf8_lossy(&bytes).into_owned()))
        };
        Ok(Some([name(first_of(second))?, name(second)?]))
    }
}

#[cfg(test)]
mod tests {
    use super::GridShape;

    #[test]
    fn coordinates_number_the_ranks_once_each_with_tensor_fastest() {
        let shape = GridShape { data: 2, stage: 3, tensor: 4 };
        let mut expected = Vec::new();
        for data in 0..2 {
            for stage in 0..3 {
                expected.extend((0..4).map(|tensor| (data, stage, tensor)));
            }
        }
        let found: Vec<_> = (0..24).map(|rank| shape.coordinates(rank)).collect();
        assert_eq!(found, expected);
        assert!(found.iter().enumerate().all(|(rank, &(d, s, t))| shape.rank(d, s, t) == rank));
    }

    #[test]
    fn a_shape_that_does_not_fit_is_refused_with_the_numbers() {
        let error = GridShape { data: 2, stage: 3, tensor: 1 }.check(8).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("data 2 × stage 3 × tensor 1 = 6 ranks, but the job has 8"), "{text}");
        assert!(GridShape { data: 0, stage: 1, tensor: 1 }.check(0).is_err());
    }
}
