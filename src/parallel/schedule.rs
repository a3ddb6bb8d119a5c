//! What a rank does in one step, as data.

/// One thing to do with one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// Its backward pass.
    Backward(usize),
}

/// The actions of one step, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// The actions.
    pub actions: Vec<Action>,
    /// The number of micro-batches.
    pub num_micro_batches: usize,
}

impl Schedule {
    /// One stage: each micro-batch forward and backward before the next, so that one set of activations is enough.
    pub fn single_stage(num_micro_batches: usize) -> Schedule {
        let actions = (0..num_micro_batches).flat_map(|m| [Action::Forward(m), Action::Backward(m)]).collect();
        Schedule { actions, num_micro_batches }
    }

    /// How many micro-batches are between their forward and their backward pass at the worst moment.
    pub fn most_live(&self) -> usize {
        let (mut live, mut most) = (0, 0);
        for action in &self.actions {
            match action {
                Action::Forward(_) => live += 1,
                Action::Backward(_) => live -= 1,
            }
            most = most.max(live);
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_stage_holds_one_micro_batch_at_a_time() {
        use Action::{Backward, Forward};
        let schedule = Schedule::single_stage(2);
        assert_eq!(schedule.actions, [Forward(0), Backward(0), Forward(1), Backward(1)]);
        assert_eq!(schedule.most_live(), 1);
    }
}
