//! Every operation of a communicator, on 1 to 8 ranks.
//!
//! The operations run in the world and in sub-groups of it, blocking and started, in one message
//! and in several. Results are compared exactly, for every element type, and with the textbook's
//! worked examples.

mod algorithms;
mod examples;
mod messages;
mod operations;
#[path = "../support/mod.rs"]
mod support;
mod world;

use phalanx::comm::{Communicator, World};
use support::cases::{self, Case};

const ALL: &[usize] = &[1, 2, 3, 4];
const UP_TO_8: &[usize] = &[1, 2, 3, 4, 5, 6, 7, 8];

static CASES: &[Case] = &[
    Case { name: "all_operations", ranks: ALL, run: |world| everywhere(world, operations::all_types) },
    Case { name: "all_operations_about_a_page", ranks: UP_TO_8, run: operations::about_a_page },
    Case { name: "operations_overlap", ranks: ALL, run: |world| everywhere(world, operations::overlap) },
    Case { name: "sums_have_one_order", ranks: ALL, run: operations::sums_have_one_order },
    Case { name: "ranks_share_leaves", ranks: UP_TO_8, run: operations::sums_of_leaves },
    Case { name: "exact_sums_over_ranks", ranks: UP_TO_8, run: operations::exact_sums },
    Case { name: "wrong_lengths_are_refused", ranks: &[1, 3], run: operations::wrong_lengths },
    Case { name: "every_algorithm", ranks: UP_TO_8, run: algorithms::every_algorithm },
    Case { name: "waits_in_any_order", ranks: &[1, 2, 3, 5], run: algorithms::waits_in_any_order },
    Case { name: "large_buffers", ranks: &[2, 3, 8], run: algorithms::large_buffers },
    Case { name: "point_to_point", ranks: &[2, 3], run: messages::point_to_point },
    Case { name: "tasks_in_the_background", ranks: &[1, 2, 3, 5], run: messages::tasks_in_the_background },
    Case { name: "more_than_a_c_int_counts", ranks: &[2], run: messages::more_than_a_c_int_counts },
    Case { name: "worked_example_collectives", ranks: &[4, 8], run: examples::collectives },
    Case { name: "worked_example_split_products", ranks: &[2, 4], run: examples::split_products },
    Case { name: "worked_example_of_four_gradients", ranks: &[4], run: examples::four_gradients },
    Case { name: "worked_example_reduce", ranks: &[8], run: examples::reduce_of_eight },
    Case { name: "worked_example_scatter_and_product", ranks: &[2, 4], run: examples::scatter_and_product },
    Case { name: "agree", ranks: &[1, 2, 3], run: world::agree },
    Case { name: "grid", ranks: &[1, 4, 6, 8], run: world::grid },
    Case { name: "world_knows_its_node", ranks: ALL, run: world::node },
    Case { name: "ranks_share_memory", ranks: ALL, run: world::shared_memory },
];

/// A rank that panics must end the job: without `MPI_Abort` the other ranks would wait for it
/// forever.
static FAILING: &[(Case, &str)] = &[(
    Case { name: "a_panic_ends_the_job", ranks: &[1, 2, 3], run: world::panic_on_the_last },
    "has had enough",
)];

fn main() -> std::process::ExitCode {
    cases::main(CASES, FAILING)
}

/// Runs `check` in the world, in a copy of it, in its halves, and in the reversed order of ranks,
/// with whole messages and with messages cut into pieces of at most 7 elements.
fn everywhere(world: &World, check: fn(&Communicator)) {
    let all = world.communicator();
    let (rank, size) = (all.rank(), all.size());
    let halves = all.split(usize::from(2 * rank >= size), rank).unwrap();
    let reversed = all.split(0, size - rank).unwrap();
    assert_eq!((reversed.rank(), reversed.size()), (size - 1 - rank, size));
    for communicator in [all, &all.split(0, rank).unwrap(), &halves, &reversed] {
        for limit in [usize::MAX, 7] {
            communicator.set_message_limit(limit);
            check(communicator);
        }
        communicator.set_message_limit(usize::MAX);
    }
}

/// Element `i` of rank `rank`: a small whole number, which every element type represents exactly.
pub fn value(rank: usize, i: usize) -> u8 {
    ((rank * 3 + i * 5) % 7 + 1) as u8
}
