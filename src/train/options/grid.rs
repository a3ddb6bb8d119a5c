//! The options of the grid: the number of ranks along each axis.

use clap::Args;

use super::TrainOptions;
use super::range::at_least_one;
use crate::comm::{Grid, GridShape, World};
use crate::{Error, Result};

/// The numbers of ranks along the axes of the grid.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Grid")]
pub struct GridOptions {
    /// Replicas of the model, each with its share of every batch; --data N is short for it [default:
    /// the ranks that the other axes leave]
    #[arg(long, value_name = "N")]
    pub replicas: Option<usize>,

    /// The number of replicas that --data gave.
    #[arg(skip)]
    pub from_data: Option<usize>,

    /// Ranks among which the layers of a replica are spread (--stages gives the number of layers of each
    /// stage) [default: the ranks that --replicas and --tensor leave, or 1]
    #[arg(long, value_name = "N")]
    pub stage: Option<usize>,

    /// Ranks that share every layer, with consecutive numbers in the job [default: the ranks that
    /// --replicas and --stage leave, or 1]
    #[arg(long, value_name = "N")]
    pub tensor: Option<usize>,
}

impl GridOptions {
    /// Returns these options and `train`, of which --data may hold the number of replicas: no source
    /// of samples is a number.
    pub fn with_data(mut self, train: &TrainOptions) -> (GridOptions, TrainOptions) {
        let mut train = train.clone();
        if let Some(Ok(replicas)) = train.data.source.data.as_ref().map(|source| source.parse()) {
            self.from_data = Some(replicas);
            train.data.source.data = None;
        }
        (self, train)
    }

    /// Returns the shape of the grid whose schedule is drawn:
    ///
    /// * where the length of the stage axis is given, by --show-ranks as `stage` or by --stage: that of a job
    ///   of `num_ranks`, if it has as many stages, or else the axes as the options give them;
    /// * where no axis is given, a pipeline;
    /// * else that of a job of `num_ranks`.
    ///
    /// Not collective.
    ///
    /// # Errors
    /// An axis is 0 or given twice, or, unless that of the stages is given, as [`GridOptions::shape`].
    pub fn drawn_shape(&self, num_ranks: usize, stage: Option<usize>) -> Result<GridShape> {
        self.axes()?;
        let (replicas, shape) = (self.replicas.or(self.from_data), self.shape(num_ranks));
        match (stage.or(self.stage), replicas.or(self.tensor)) {
            (Some(stage), _) => Ok(shape.ok().filter(|shape| shape.stage == stage).unwrap_or(GridShape {
                data: replicas.unwrap_or(1),
                stage,
                tensor: self.tensor.unwrap_or(1),
            })),
            (None, Some(_)) => shape,
            (None, None) => Ok(GridShape { data: 1, stage: num_ranks, tensor: 1 }),
        }
    }

    /// Returns the shape of a grid of `num_ranks`: the first of the axes data, stage and tensor that
    /// is not given takes the ranks that the others leave. Not collective.
    ///
    /// # Errors
    /// An axis is 0, or the product of the axes is not `num_ranks`.
    pub fn shape(&self, num_ranks: usize) -> Result<GridShape> {
        let axes = self.axes()?;
        let given = axes.iter().filter_map(|(_, axis)| *axis).fold(1, usize::saturating_mul);
        let mut left = Some(num_ranks / given);
        let [data, stage, tensor] =
            axes.map(|(_, axis)| axis.unwrap_or_else(|| left.take().unwrap_or(1).max(1)));
        let product = data.saturating_mul(stage).saturating_mul(tensor);
        if product == num_ranks {
            return Ok(GridShape { data, stage, tensor });
        }
        let words: Vec<String> =
            axes.iter().filter_map(|(option, axis)| axis.map(|axis| format!("{option} {axis}"))).collect();
        let why = match left {
            Some(_) => format!("{} make {product} ranks, but the job has {num_ranks}", words.join(" × ")),
            None => format!(
                "the job has {num_ranks} ranks, which is not a multiple of {} = {given}",
                words.join(" × ")
            ),
        };
        Err(Error::input("laying out the grid", why))
    }

    /// Returns the names of the axes' options and their lengths, as far as they are given.
    fn axes(&self) -> Result<[(&'static str, Option<usize>); 3]> {
        let data = match (self.replicas, self.from_data) {
            (Some(replicas), Some(data)) => {
                let why = format!("--data {data} and --replicas {replicas} both give the data axis");
                return Err(Error::input("laying out the grid", why));
            }
            (None, Some(data)) => ("--data", Some(data)),
            (replicas, None) => ("--replicas", replicas),
        };
        let axes = [data, ("--stage", self.stage), ("--tensor", self.tensor)];
        axes.iter().try_for_each(|(option, axis)| at_least_one(option, *axis))?;
        Ok(axes)
    }

    /// Splits the world as these options say, and warns if ranks that share layers are on different
    /// nodes. Collective.
    ///
    /// # Errors
    /// The options do not fit the number of ranks: the same error on every rank.
    pub fn grid(&self, world: &World) -> Result<Grid> {
        let all = world.communicator();
        let shape = all.agree(self.shape(world.size()))?;
        let axes = [("data", shape.data), ("stage", shape.stage), ("tensor", shape.tensor)];
        let settings = axes.map(|(name, size)| (name.to_owned(), size.to_string()));
        all.compare("comparing the grids of the ranks", &settings)?;
        let grid = Grid::new(world, shape)?;
        if let (Some([first, second]), true) = (grid.tensor_axis_between_nodes(world)?, world.is_root()) {
            log::warn!(
                "--tensor {}: ranks {} and {} share layers but are on two nodes, {} and {}; they exchange \
                 activations in every layer, so a tensor axis should stay within a node",
                shape.tensor,
                first.0,
                second.0,
                first.1,
                second.1
            );
        }
        Ok(grid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_axis_left_out_takes_what_is_left() {
        let shape = |replicas, stage, tensor, ranks| {
            let shape = GridOptions { replicas, from_data: None, stage, tensor }.shape(ranks);
            shape.map(|shape| (shape.data, shape.stage, shape.tensor)).map_err(|error| error.to_string())
        };
        assert_eq!(shape(None, None, None, 8), Ok((8, 1, 1)));
        assert_eq!(shape(None, Some(2), Some(2), 8), Ok((2, 2, 2)));
        assert_eq!(shape(Some(2), None, None, 8), Ok((2, 4, 1)));
        assert_eq!(shape(Some(2), Some(2), None, 12), Ok((2, 2, 3)));
        assert_eq!(shape(Some(2), Some(2), Some(2), 8), Ok((2, 2, 2)));
        let error = shape(Some(2), Some(3), Some(2), 8).unwrap_err();
        assert!(error.contains("--replicas 2 × --stage 3 × --tensor 2 make 12 ranks, but the job has 8"));
        let error = shape(None, Some(3), None, 8).unwrap_err();
        assert!(error.contains("the job has 8 ranks, which is not a multiple of --stage 3 = 3"), "{error}");
        assert!(shape(None, Some(16), None, 8).is_err());
        let both = GridOptions { replicas: Some(2), from_data: Some(4), stage: None, tensor: None };
        assert!(both.shape(8).unwrap_err().to_string().contains("--data 4 and --replicas 2"));
        assert!(shape(Some(0), None, None, 8).is_err());
        assert!(shape(Some(usize::MAX), Some(2), None, 8).is_err());
    }

    #[test]
    fn a_schedule_is_drawn_for_jobs_of_other_sizes() {
        let shape = |replicas, from_data, stage, ranks| {
            let shape = GridOptions { replicas, from_data, stage, tensor: None }.drawn_shape(ranks, None);
            shape.map(|shape| (shape.data, shape.stage, shape.tensor)).map_err(|error| error.to_string())
        };
        assert_eq!(shape(None, None, None, 6), Ok((1, 6, 1)));
        assert_eq!(shape(None, None, Some(2), 8), Ok((4, 2, 1)));
        assert_eq!(shape(Some(3), None, Some(4), 1), Ok((3, 4, 1)));
        assert_eq!(shape(None, Some(2), None, 8), Ok((2, 4, 1)));
        assert!(shape(Some(0), None, Some(2), 8).is_err());
        assert!(shape(Some(2), Some(4), Some(2), 8).unwrap_err().contains("--data 4 and --replicas 2"));
        // --show-ranks
        let options = GridOptions { replicas: Some(2), from_data: None, stage: None, tensor: None };
        let shape = options.drawn_shape(1, Some(4)).unwrap();
        assert_eq!((shape.data, shape.stage, shape.tensor), (2, 4, 1));
    }
}
