//! [`Site`], an array in the computation of a step that an audit compares.

/// An array in the computation of a step. Sites are ordered as they are computed, so that the first
/// that differs is where a fault happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// A tensor of the parameters before the step, by its number in the model.
    Parameter {
        /// The tensor.
        tensor: usize,
    },
    /// The values at a point of a stage, in a part of the leaf.
    Value {
        /// The stage.
        stage: usize,
        /// The point; 0 is the input of the stage.
        point: usize,
        /// The part of the leaf.
        part: usize,
    },
    /// The gradients of the values at a point of a stage, in a part of the leaf.
    Gradient {
        /// The stage.
        stage: usize,
        /// The point; the last one is the output of the stage.
        point: usize,
        /// The part of the leaf.
        part: usize,
    },
    /// The gradient of a tensor, summed over the leaf.
    WeightGradient {
        /// The stage.
        stage: usize,
        /// The number of the tensor in the model.
        tensor: usize,
    },
    /// A block of the gradient of a tensor, summed over the replicas.
    GradientSum {
        /// The number of the first tensor in the block.
        tensor: usize,
    },
    /// A block of a tensor and its slots after the update.
    Update {
        /// The number of the first tensor in the block.
        tensor: usize,
    },
    /// A block of a tensor as another replica has received it after the update.
    Received {
        /// The number of the first tensor in the block.
        tensor: usize,
    },
}

/// The bits of a field, enough for the numbers of tensors, stages, points and parts.
const BITS: u32 = 20;
const MASK: u64 = (1 << BITS) - 1;

impl Site {
    /// Returns a number by which sites are ordered, and from which [`Site::from_order`] makes the
    /// site again.
    pub fn order(self) -> u64 {
        let number = |kind: u64, fields: [usize; 3]| {
            fields.iter().fold(kind, |number, field| number << BITS | *field as u64 & MASK)
        };
        let last = MASK as usize;
        match self {
            Site::Parameter { tensor } => number(0, [tensor, 0, 0]),
            Site::Value { stage, point, part } => number(1, [stage, point, part]),
            // from the last stage and point to the first
            Site::Gradient { stage, point, part } => number(2, [last - stage, last - point, part]),
            Site::WeightGradient { stage, tensor } => number(3, [last - stage, last - tensor, 0]),
            Site::GradientSum { tensor } => number(4, [tensor, 0, 0]),
            Site::Update { tensor } => number(5, [tensor, 0, 0]),
            Site::Received { tensor } => number(6, [tensor, 0, 0]),
        }
    }

    /// Returns the site with this order.
    pub fn from_order(order: u64) -> Site {
        let field = |index: u32| (order >> (BITS * index) & MASK) as usize;
        let (first, second, third) = (field(2), field(1), field(0));
        let last = MASK as usize;
        match order >> (3 * BITS) {
            0 => Site::Parameter { tensor: first },
            1 => Site::Value { stage: first, point: second, part: third },
            2 => Site::Gradient { stage: last - first, point: last - second, part: third },
            3 => Site::WeightGradient { stage: last - first, tensor: last - second },
            4 => Site::GradientSum { tensor: first },
            5 => Site::Update { tensor: first },
            _ => Site::Received { tensor: first },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Site;

    #[test]
    fn sites_follow_the_computation() {
        let sites = [
            Site::Parameter { tensor: 3 },
            Site::Parameter { tensor: 120_000 },
            Site::Value { stage: 0, point: 2, part: 0 },
            Site::Value { stage: 1, point: 0, part: 1 },
            Site::Gradient { stage: 1, point: 2, part: 0 },
            Site::Gradient { stage: 1, point: 1, part: 1 },
            Site::Gradient { stage: 0, point: 5, part: 0 },
            Site::WeightGradient { stage: 1, tensor: 4 },
            Site::WeightGradient { stage: 0, tensor: 1 },
            Site::WeightGradient { stage: 0, tensor: 0 },
            Site::GradientSum { tensor: 2 },
            Site::Update { tensor: 0 },
            Site::Received { tensor: 9 },
        ];
        assert!(sites.is_sorted_by_key(|site| site.order()));
        assert!(sites.iter().all(|site| Site::from_order(site.order()) == *site));
    }
}
