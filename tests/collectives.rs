//! Every operation of a communicator on 1 to 4 ranks, in the world and in sub-groups of it, blocking and not, in one message
//! and cut up: the textbook's worked examples, and exact expectations for every element type.

mod collective_cases;
mod support;

use collective_cases::algorithms;
use phalanx::comm::{Communicator, Element, Grid, GridShape, Operation, World};
use phalanx::{Error, Result};
use support::cases::{self, Case};

const ALL: &[usize] = &[1, 2, 3, 4];

static CASES: &[Case] = &[
    Case { name: "all_operations", ranks: ALL, run: |world| everywhere(world, all_operations) },
    Case { name: "all_operations_about_a_page", ranks: &[1, 2, 3, 4, 5, 6, 7, 8], run: about_a_page },
    Case { name: "operations_overlap", ranks: ALL, run: |world| everywhere(world, operations_overlap) },
    Case { name: "worked_example_collectives", ranks: &[4, 8], run: worked_collectives },
    Case { name: "worked_example_split_products", ranks: &[2, 4], run: split_products },
    Case { name: "worked_example_of_four_gradients", ranks: &[4], run: four_gradients },
    Case { name: "worked_example_reduce", ranks: &[8], run: reduce_of_eight },
    Case { name: "worked_example_scatter_and_product", ranks: &[2, 4], run: scatter_and_product },
    Case { name: "point_to_point", ranks: &[2, 3], run: point_to_point },
    Case { name: "sums_have_one_order", ranks: ALL, run: sums_have_one_order },
    Case { name: "every_algorithm", ranks: &[1, 2, 3, 4, 5, 6, 7, 8], run: algorithms::every_algorithm },
    Case { name: "waits_in_any_order", ranks: &[1, 2, 3, 5], run: algorithms::waits_in_any_order },
    Case { name: "large_buffers", ranks: &[2, 3, 8], run: algorithms::large_buffers },
    Case { name: "more_than_a_c_int_counts", ranks: &[2], run: more_than_a_c_int_counts },
    Case { name: "wrong_lengths_are_refused", ranks: &[1, 3], run: wrong_lengths },
    Case { name: "agree", ranks: &[1, 2, 3], run: agree },
    Case { name: "grid", ranks: &[1, 4, 6, 8], run: grid },
    Case { name: "world_knows_its_node", ranks: ALL, run: node },
];

fn main() -> std::process::ExitCode {
    cases::main(CASES, FAILING)
}

/// A rank that panics while the others wait for it takes the job down; without the abort they would wait for ever.
static FAILING: &[(Case, &str)] =
    &[(Case { name: "a_panic_ends_the_job", ranks: &[1, 2, 3], run: panic_on_the_last }, "panicked at")];

fn panic_on_the_last(world: &World) {
    if world.rank() + 1 == world.size() {
        panic!("rank {} has had enough", world.rank());
    }
    world.communicator().barrier();
}

/// Runs `check` in the world, in a copy of it, in halves, and in the reversed order of ranks; with whole messages, and with
/// messages cut as if MPI could count to 7 only.
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

/// Element `i` of rank `rank`: small whole numbers, exact in every type.
pub fn value(rank: usize, i: usize) -> u8 {
    ((rank * 3 + i * 5) % 7 + 1) as u8
}

fn all_operations(communicator: &Communicator) {
    for len in [0, 1, 2, 7, 8, 33] {
        typed::<f32>(communicator, len, f32::from);
        typed::<f64>(communicator, len, f64::from);
        typed::<i32>(communicator, len, i32::from);
        typed::<i64>(communicator, len, i64::from);
        typed::<u8>(communicator, len, |x| x);
    }
}

fn about_a_page(world: &World) {
    for len in [0, 1, 1023, 1024, 1025, 100_001] {
        typed::<f32>(world.communicator(), len, f32::from);
    }
}

fn typed<T: Element + std::fmt::Debug>(c: &Communicator, len: usize, from: fn(u8) -> T) {
    let (rank, size) = (c.rank(), c.size());
    let of = |rank: usize, range: std::ops::Range<usize>| -> Vec<T> {
        range.map(|i| from(value(rank, i))).collect()
    };
    let zeros = |len: usize| vec![from(0); len];
    let own = of(rank, 0..len);
    let long = of(rank, 0..len * size);
    let gathered: Vec<T> = (0..size).flat_map(|rank| of(rank, 0..len)).collect();

    for root in 0..size {
        let mut values = own.clone();
        c.broadcast(&mut values, root).unwrap();
        assert_eq!(values, of(root, 0..len));
        assert_eq!(c.start_broadcast(own.clone(), root).unwrap().wait(), of(root, 0..len));

        let mut part = zeros(len);
        c.scatter(&long, &mut part, root).unwrap();
        assert_eq!(part, of(root, rank * len..(rank + 1) * len));
        let (_, part) = c.start_scatter(long.clone(), zeros(len), root).unwrap().wait();
        assert_eq!(part, of(root, rank * len..(rank + 1) * len));

        let expected = if rank == root { gathered.clone() } else { zeros(len * size) };
        let mut whole = zeros(len * size);
        c.gather(&own, &mut whole, root).unwrap();
        assert_eq!(whole, expected);
        assert_eq!(c.start_gather(own.clone(), zeros(len * size), root).unwrap().wait().1, expected);
    }

    let mut whole = zeros(len * size);
    c.all_gather(&own, &mut whole).unwrap();
    assert_eq!(whole, gathered);
    assert_eq!(c.start_all_gather(own.clone(), zeros(len * size)).unwrap().wait().1, gathered);
    let mut in_place = zeros(len * size);
    in_place[rank * len..(rank + 1) * len].copy_from_slice(&own);
    assert_eq!(c.start_all_gather_in_place(in_place).unwrap().wait(), gathered);

    let exchanged: Vec<T> = (0..size).flat_map(|from| of(from, rank * len..(rank + 1) * len)).collect();
    let mut received = zeros(len * size);
    c.all_to_all(&long, &mut received).unwrap();
    assert_eq!(received, exchanged);
    assert_eq!(c.start_all_to_all(long.clone(), zeros(len * size)).unwrap().wait().1, exchanged);

    for operation in [Operation::Sum, Operation::Product, Operation::Min, Operation::Max] {
        let expect = |i: usize| -> T {
            let all = (0..size).map(|rank| u32::from(value(rank, i)));
            let result = match operation {
                Operation::Sum => all.sum(),
                Operation::Product => all.product::<u32>() % 256,
                Operation::Min => all.min().unwrap(),
                Operation::Max => all.max().unwrap(),
            };
            from(result as u8)
        };
        // a product that wraps in u8 does not in the others: keep to what all of them hold
        let fits = |i: usize| (0..size).map(|rank| u32::from(value(rank, i))).product::<u32>() < 256;
        if operation == Operation::Product && !(0..len * size).all(fits) {
            continue;
        }
        let expected: Vec<T> = (0..len).map(expect).collect();
        let mut values = own.clone();
        c.all_reduce(&mut values, operation).unwrap();
        assert_eq!(values, expected);
        assert_eq!(c.start_all_reduce(own.clone(), zeros(len), operation).unwrap().wait().1, expected);

        for root in 0..size {
            let expected = if rank == root { expected.clone() } else { zeros(len) };
            let mut values = zeros(len);
            c.reduce(&own, &mut values, operation, root).unwrap();
            assert_eq!(values, expected);
            assert_eq!(c.start_reduce(own.clone(), zeros(len), operation, root).unwrap().wait().1, expected);
        }

        let expected: Vec<T> = (0..len * size).map(expect).collect();
        assert_eq!(c.start_all_reduce_in_place(long.clone(), operation).unwrap().wait(), expected);

        let part = rank * len..(rank + 1) * len;
        let expected: Vec<T> = part.clone().map(expect).collect();
        let mut values = zeros(len);
        c.reduce_scatter(&long, &mut values, operation).unwrap();
        assert_eq!(values, expected);
        let scattered = c.start_reduce_scatter(long.clone(), operation).unwrap().wait();
        assert_eq!(scattered[part.clone()], expected);
        assert!(
            (0..len * size).filter(|i| !part.contains(i)).all(|i| scattered[i] == long[i]),
            "other parts stay"
        );
    }

    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut received = zeros(len);
    c.send_receive(&own, next, &mut received, previous, 5).unwrap();
    assert_eq!(received, of(previous, 0..len));
    let receiving = c.start_receive(zeros(len), previous, 6).unwrap();
    let sending = c.start_send(own.clone(), next, 6).unwrap();
    assert_eq!(receiving.wait(), of(previous, 0..len));
    sending.wait();
}

/// Several operations under way at once, waited for in another order than started.
fn operations_overlap(c: &Communicator) {
    let (rank, size) = (c.rank(), c.size());
    let start =
        |i: usize| c.start_reduce_scatter(vec![(rank + i) as i64; 11 * size], Operation::Sum).unwrap();
    let mut pending: Vec<_> = (0..5).map(start).collect();
    let broadcast = c.start_broadcast(vec![rank as i32; 3], size - 1).unwrap();
    let barrier = c.start_barrier();
    while !pending.iter_mut().all(|operation| operation.test()) {}
    for (i, operation) in pending.into_iter().enumerate().rev() {
        let expected = (0..size).map(|rank| rank + i).sum::<usize>() as i64;
        assert!(operation.wait()[rank * 11..][..11].iter().all(|x| *x == expected));
    }
    assert_eq!(broadcast.wait(), [size as i32 - 1; 3]);
    barrier.wait();
}

/// In the world, or in each group of four of a larger one.
fn worked_collectives(world: &World) {
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

/// A · B with the columns of B on two ranks, and with the columns of A and rows of B: what tensor parallelism is made of.
fn split_products(world: &World) {
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

fn four_gradients(world: &World) {
    let mut gradient = [[0.8, -0.2, -0.7, 0.4][world.rank()]];
    world.communicator().all_reduce(&mut gradient, Operation::Sum).unwrap();
    assert!((gradient[0] - 0.3_f64).abs() < 1e-12);
}

fn reduce_of_eight(world: &World) {
    let own = [[0.1, -0.2, -0.3, 0.5, -0.6, -0.1, 0.2, 0.3][world.rank()]];
    let mut sum = [0.0_f64];
    world.communicator().reduce(&own, &mut sum, Operation::Sum, 0).unwrap();
    assert!(!world.is_root() || (sum[0] + 0.1).abs() < 1e-12);
}

/// The examples for two ranks, in the world or in the group of ranks 0 and 1 of a larger one.
fn scatter_and_product(world: &World) {
    let pair = world.communicator().split(world.rank() / 2, world.rank()).unwrap();
    let r = pair.rank();
    let mut part = [0; 2];
    pair.scatter(&[0, 1, 2, 3], &mut part, 0).unwrap();
    assert_eq!(part, [[0, 1], [2, 3]][r]);
    let mut product = [0; 2];
    pair.reduce(&[r as i32 + 1, r as i32 + 10], &mut product, Operation::Product, 0).unwrap();
    assert!(r != 0 || product == [2, 110]);
}

fn point_to_point(world: &World) {
    let c = world.communicator();
    match c.rank() {
        0 => {
            c.send(&[43523], 1, 7).unwrap();
            c.start_send(vec![43523, 1], 1, 8).unwrap().wait();
            c.send(&[1_u8; 9], 1, 9).unwrap();
        }
        1 => {
            let mut number = [0; 4];
            assert_eq!(c.receive(&mut number, 0, 7).unwrap(), 1, "fewer than the buffer holds is fine");
            assert_eq!(number, [43523, 0, 0, 0]);
            assert_eq!(c.start_receive(vec![0; 3], 0, 8).unwrap().wait(), [43523, 1, 0]);
            let error = c.receive(&mut [0_u8; 8], 0, 9).unwrap_err().to_string();
            assert!(error.contains("the message has 9 elements, the buffer room for 8"), "{error}");
        }
        _ => {}
    }
    assert!(c.send(&[1], c.size(), 0).unwrap_err().to_string().contains("there is no rank"));
    assert!(c.send(&[1], 0, -1).unwrap_err().to_string().contains("tag -1"));
}

/// Numbers whose sum depends on the order: the reduce-scatter adds in rank order, on every rank and every time.
fn sums_have_one_order(world: &World) {
    let c = world.communicator();
    let (rank, size) = (c.rank(), c.size());
    let of = |rank: usize, i: usize| {
        ((rank * 7919 + i * 104_729) % 1000) as f32 * 10_f32.powi((rank % 3) as i32 * 3 - 4)
    };
    let len = 10_007;
    let own: Vec<f32> = (0..len * size).map(|i| of(rank, i)).collect();
    let expected: Vec<f32> = (rank * len..(rank + 1) * len)
        .map(|i| (1..size).fold(of(0, i), |sum, rank| sum + of(rank, i)))
        .collect();
    for _ in 0..3 {
        let found = c.start_reduce_scatter(own.clone(), Operation::Sum).unwrap().wait();
        assert!(found[rank * len..][..len].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        let whole = c.start_all_reduce_in_place(own.clone(), Operation::Sum).unwrap().wait();
        assert!(whole[rank * len..][..len].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

fn more_than_a_c_int_counts(world: &World) {
    let len = (1_usize << 31) + 9;
    let needed = 2 * world.size() * len;
    let available = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = available.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kibibytes =
        available.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<usize>().ok()).unwrap_or(0);
    let mut enough = [i32::from(kibibytes * 1024 > needed)];
    world.communicator().all_reduce(&mut enough, Operation::Min).unwrap();
    if enough[0] == 0 {
        println!("SKIPPED: messages above 2^31 bytes need {needed} bytes of free memory here");
        return;
    }
    let mut values = vec![0_u8; len];
    if world.is_root() {
        for i in [0, 1, len / 2, len - 2, len - 1] {
            values[i] = (i % 251 + 1) as u8;
        }
        world.communicator().send(&values, 1, 0).unwrap();
    } else {
        assert_eq!(world.communicator().receive(&mut values, 0, 0).unwrap(), len);
        let found: Vec<usize> = (0..len).filter(|&i| values[i] != 0).collect();
        assert_eq!(found, [0, 1, len / 2, len - 2, len - 1]);
        assert!(found.iter().all(|&i| values[i] == (i % 251 + 1) as u8));
    }
    // a broadcast as one message, a reduction in pieces
    world.communicator().broadcast(&mut values, 1).unwrap();
    assert_eq!((values[1], values[len - 1]), (2, ((len - 1) % 251 + 1) as u8));
    world.communicator().all_reduce(&mut values, Operation::Max).unwrap();
    assert_eq!((values[1], values[len - 2]), (2, ((len - 2) % 251 + 1) as u8));
}

fn wrong_lengths(world: &World) {
    let c = world.communicator();
    let size = c.size();
    let refused = |outcome: Result<()>, what: &str| {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(what), "{text}");
    };
    refused(c.all_gather(&[1, 2], &mut vec![0; 2 * size + 1]), "one for each rank");
    refused(c.reduce_scatter(&vec![1; size + 1], &mut [0], Operation::Sum), "one for each rank");
    refused(c.all_to_all(&vec![1; size], &mut vec![1; size + 1]), "elements to send");
    refused(c.broadcast(&mut [1], size), "there is no rank");
    refused(c.start_all_reduce(vec![1], vec![1, 2], Operation::Sum).map(drop), "room for 2 to receive");
    if size > 1 {
        refused(c.start_all_gather_in_place(vec![1; size + 1]).map(drop), "one for each rank");
    }
}

fn agree(world: &World) {
    let c = world.communicator();
    assert_eq!(c.agree(Ok(c.rank())).unwrap(), c.rank());
    let last = c.size() - 1;
    let one = if c.rank() == last { Err(Error::input("reading x", "it is broken")) } else { Ok(()) };
    let error = c.agree(one).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    let expected = if last == 0 {
        "reading x: it is broken".into()
    } else {
        format!("reading x: it is broken (on rank {last} only)")
    };
    assert_eq!(error.to_string(), expected);
    let all = c.agree::<()>(Err(Error::failed("writing y", c.rank()))).unwrap_err();
    assert_eq!((all.exit_code(), all.to_string()), (1, "writing y: 0".into()));
}

fn grid(world: &World) {
    let size = world.size();
    let shapes = match size {
        1 => vec![[1, 1, 1]],
        4 => vec![[4, 1, 1], [2, 2, 1], [2, 1, 2], [1, 2, 2], [1, 1, 4]],
        6 => vec![[1, 2, 3], [3, 2, 1], [6, 1, 1]],
        _ => vec![[2, 2, 2], [8, 1, 1]],
    };
    for [data, stage, tensor] in shapes {
        let shape = GridShape { data, stage, tensor };
        let grid = Grid::new(world, shape).unwrap();
        assert_eq!((grid.data.size(), grid.stage.size(), grid.tensor.size()), (data, stage, tensor));
        assert_eq!(
            (grid.data.rank(), grid.stage.rank(), grid.tensor.rank()),
            shape.coordinates(world.rank())
        );
        // the sum of the world's ranks along an axis
        let mut along = [world.rank() as i64];
        grid.tensor.all_reduce(&mut along, Operation::Sum).unwrap();
        let first = world.rank() / tensor * tensor;
        assert_eq!(along[0], (first..first + tensor).sum::<usize>() as i64);
    }
    let shape = GridShape { data: size, stage: 2, tensor: 1 };
    assert_eq!(Grid::new(world, shape).map(drop).unwrap_err().exit_code(), 2);
}

fn node(world: &World) {
    assert_eq!(
        (world.num_nodes(), world.local_rank(), world.num_local_ranks()),
        (1, world.rank(), world.size())
    );
    assert!(!phalanx::comm::library_version().is_empty());
}
