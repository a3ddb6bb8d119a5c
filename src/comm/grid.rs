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
        let product = data.saturating_mul(*stage).saturating_mul(*tensor);
        if product == world && world > 0 {
            return Ok(());
        }
        let why = format!(
            "data {data} × stage {stage} × tensor {tensor} = {product} ranks, but the job has {world}"
        );
        Err(Error::input("laying out the grid", why))
    }
}

/// A rank's communicators: of everyone, and of the ranks that differ from it along one axis only.
///
/// MPI has a limited number of communicators, about 2,000 in MPICH, and ours are never freed: make
/// one grid for all training runs of a process.
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
    /// Duplicates for operations that overlap with others of the same ranks.
    pub channels: Channels,
}

/// Duplicates of a grid's communicators, one for each kind of operation that goes on beside others,
/// so that no message is matched with one of another kind.
#[derive(Clone)]
pub struct Channels {
    /// Reductions of gradients, over the data axis.
    pub reductions: Communicator,
    /// Gathers of parameters, over the data axis.
    pub gathers: Communicator,
    /// Sums of the gradients' squares, over all ranks.
    pub norms: Communicator,
    /// Activations and their gradients, over the stage axis.
    pub stages: Communicator,
    /// Gradients of tensors that two stages use, over the stage axis.
    pub tied: Communicator,
    /// Parts of activations, over the tensor axis.
    pub tensors: Communicator,
    /// Parts of the state for checkpoints, over all ranks.
    pub checkpoints: Communicator,
    /// Samples of other nodes, over all ranks.
    pub samples: Communicator,
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
        Ok(Grid::of(
            shape,
            all.duplicate(),
            all.split(stage * shape.tensor + tensor, data)?,
            all.split(data * shape.tensor + tensor, stage)?,
            all.split(data * shape.stage + stage, tensor)?,
        ))
    }

    /// Makes a grid of this rank alone, beside every other rank. Collective.
    ///
    /// # Errors
    /// None but those of a split.
    pub fn alone(world: &World) -> Result<Grid> {
        let all = world.communicator().split(world.rank(), 0)?;
        let axis = || all.duplicate();
        let (data, stage, tensor) = (axis(), axis(), axis());
        Ok(Grid::of(GridShape::data(1), all, data, stage, tensor))
    }

    fn of(
        shape: GridShape,
        all: Communicator,
        data: Communicator,
        stage: Communicator,
        tensor: Communicator,
    ) -> Grid {
        let channels = Channels {
            reductions: data.duplicate(),
            gathers: data.duplicate(),
            norms: all.duplicate(),
            stages: stage.duplicate(),
            tied: stage.duplicate(),
            tensors: tensor.duplicate(),
            checkpoints: all.duplicate(),
            samples: all.duplicate(),
        };
        Grid { shape, all, data, stage, tensor, channels }
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
