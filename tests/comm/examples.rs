//! The textbook's worked examples.

use phalanx::comm::{Operation, World};

/// All-reduce, reduce-scatter and all-gather on four ranks, or on each four ranks of a larger
/// world.
pub fn collectives(world: &World) {
    let c = &world.communicator().split(world.rank() / 4, world.rank()).unwrap();
    let r = c.rank() as f32;
    let own = [r, 1.0 + r, 2.0 + r, 3.0 + r];
    let mut sums = own;
    c.all_reduce(&mut sums, Operation::Sum).unwrap();
    assert_eq!(sums, [6.0, 10.0, 14.0, 18.0]);
    let mut part = [0.0];
    c.reduce_scatter(&own, &mut part, Operation::Sum).unwrap();
    assert_eq!(part, [6.0 + 4.0 * r]);
    let mut whole = [0.0; 4];
    c.all_gather(&part, &mut whole).unwrap();
    assert_eq!(whole, sums, "all-reduce is reduce-scatter, then all-gather");
}

/// Multiplies A · B with the columns of B on two ranks, then with the columns of A and the rows of
/// B: the two products that tensor parallelism consists of.
pub fn split_products(world: &World) {
    let pair = world.communicator().split(world.rank() / 2, world.rank()).unwrap();
    let r = pair.rank();
    let a = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]];
    let b = [[8.0, 9.0], [10.0, 11.0], [12.0, 13.0], [14.0, 15.0]];
    let whole = [[76.0, 82.0], [252.0, 274.0]];

    let column: Vec<f64> = a.iter().map(|row| (0..4).map(|k| row[k] * b[k][r]).sum()).collect();
    assert_eq!(column, [whole[0][r], whole[1][r]]);
    let mut columns = [0.0; 4];
    pair.all_gather(&column, &mut columns).unwrap();
    assert_eq!(columns, [76.0, 252.0, 82.0, 274.0]);

    let part = |i: usize, j: usize| (2 * r..2 * r + 2).map(|k| a[i][k] * b[k][j]).sum::<f64>();
    let mut sum = [part(0, 0), part(0, 1), part(1, 0), part(1, 1)];
    assert_eq!(sum, [[10.0, 11.0, 82.0, 91.0], [66.0, 71.0, 170.0, 183.0]][r]);
    pair.all_reduce(&mut sum, Operation::Sum).unwrap();
    assert_eq!(sum, [76.0, 82.0, 252.0, 274.0]);
}

pub fn four_gradients(world: &World) {
    let mut gradient = [[0.8, -0.2, -0.7, 0.4][world.rank()]];
    world.communicator().all_reduce(&mut gradient, Operation::Sum).unwrap();
    assert!((gradient[0] - 0.3_f64).abs() < 1e-12);
}

pub fn reduce_of_eight(world: &World) {
    let own = [[0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3][world.rank()]];
    let mut sum = [0.0_f64];
    world.communicator().reduce(&own, &mut sum, Operation::Sum, 0).unwrap();
    assert!(!world.is_root() || (sum[0] + 0.1).abs() < 1e-12);
}

/// The examples for two ranks, in the world or in each pair of ranks of a larger one.
pub fn scatter_and_product(world: &World) {
    let pair = world.communicator().split(world.rank() / 2, world.rank()).unwrap();
    let r = pair.rank();
    let mut part = [0; 2];
    pair.scatter(&[0, 1, 2, 3], &mut part, 0).unwrap();
    assert_eq!(part, [[0, 1], [2, 3]][r]);
    let mut product = [0; 2];
    pair.reduce(&[r as i32 + 1, r as i32 + 10], &mut product, Operation::Product, 0).unwrap();
    assert!(r != 0 || product == [2, 110]);
}
