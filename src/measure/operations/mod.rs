//! The operations that can be measured, one file for each: its name, the bytes that it moves, the
//! values that it should give, and the calls that run it.

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod gather;
mod reduce;
mod reduce_scatter;
mod scan;
mod scatter;
mod send_receive;

use super::operation::Measured;

/// All operations, in the order in which they are measured.
pub static OPERATIONS: [Measured; 10] = [
    &send_receive::SEND_RECEIVE,
    &broadcast::BROADCAST,
    &scatter::SCATTER,
    &gather::GATHER,
    &all_gather::ALL_GATHER,
    &all_to_all::ALL_TO_ALL,
    &reduce::REDUCE,
    &all_reduce::ALL_REDUCE,
    &reduce_scatter::REDUCE_SCATTER,
    &scan::SCAN,
];

/// Returns the operation called `name`.
pub fn operation_named(name: &str) -> Option<Measured> {
    OPERATIONS.into_iter().find(|operation| operation.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::buffers::Geometry;

    #[test]
    fn the_busiest_link_carries_what_nccl_tests_say() {
        let factors = |size| OPERATIONS.map(|operation| (operation.bus_factor)(size));
        assert_eq!(factors(4), [1.0, 1.0, 0.75, 0.75, 0.75, 0.75, 1.0, 1.5, 0.75, 1.0]);
        assert_eq!((all_reduce::ALL_REDUCE.bus_factor)(1), 0.0);
    }

    #[test]
    fn every_rank_knows_what_to_expect() {
        let of = |name: &str, rank: usize| {
            let (operation, geometry) = (operation_named(name).unwrap(), Geometry { rank, size: 2, len: 4 });
            let expected = |at| (operation.expected)(&geometry, at);
            (operation.received)(&geometry).map(expected).collect::<Vec<f32>>()
        };
        // rank 0 has 7 8 9 −3, rank 1 has −2 −1 0 1
        assert_eq!(of("send-receive", 1), [7.0, 8.0, 9.0, -3.0]);
        assert_eq!(of("scatter", 1), [9.0, -3.0]);
        assert_eq!(of("gather", 0), [7.0, 8.0, 0.0, 1.0]);
        assert_eq!(of("all-to-all", 1), [9.0, -3.0, 0.0, 1.0]);
        assert_eq!(of("all-reduce", 0), [5.0, 7.0, 9.0, -2.0]);
        assert_eq!(of("reduce-scatter", 1), [9.0, -2.0]);
        assert_eq!(of("scan", 0), [7.0, 8.0, 9.0, -3.0]);
        assert_eq!(of("scan", 1), [5.0, 7.0, 9.0, -2.0]);
        assert!(of("reduce", 1).is_empty());
    }
}
