//! Every operation with exact expectations, for every element type.

use phalanx::Result;
use phalanx::comm::{Algorithm, Call, Collective, Communicator, Element, Operation, World, shard};
use phalanx::memory::ElementType;
use phalanx::sums::{ExactSum, Leaves, Section, Subtrees};

use crate::value;

/// Runs every operation on every element type, with empty, odd and larger buffers.
pub fn all_types(communicator: &Communicator) {
    for len in [0, 1, 2, 7, 8, 33] {
        typed::<f32>(communicator, len, f32::from);
        typed::<f64>(communicator, len, f64::from);
        typed::<i32>(communicator, len, i32::from);
        typed::<i64>(communicator, len, i64::from);
        typed::<u8>(communicator, len, |x| x);
    }
}

pub fn about_a_page(world: &World) {
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
        // factors whose product over 8 ranks all types hold
        let term = |rank: usize, i: usize| match operation {
            Operation::Product => [1, 2, 3][(rank + i) % 3],
            _ => value(rank, i),
        };
        let terms = |range: std::ops::Range<usize>| range.map(|i| from(term(rank, i))).collect::<Vec<T>>();
        let [own, long] = [terms(0..len), terms(0..len * size)];
        let combined = |num_ranks: usize, i: usize| -> T {
            let all = (0..num_ranks).map(|rank| u32::from(term(rank, i)));
            let result = match operation {
                Operation::Sum => all.sum(),
                Operation::Product => all.product(),
                Operation::Min => all.min().unwrap(),
                Operation::Max => all.max().unwrap(),
            };
            from(u8::try_from(result).unwrap())
        };
        let expect = |i: usize| combined(size, i);
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

        let expected: Vec<T> = (0..len).map(|i| combined(rank + 1, i)).collect();
        let mut values = own.clone();
        c.scan(&mut values, operation);
        assert_eq!(values, expected);
        assert_eq!(c.start_scan(own.clone(), zeros(len), operation).unwrap().wait().1, expected);

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

/// Waits for several started operations in another order than they were started in.
pub fn overlap(c: &Communicator) {
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

/// Reduces values whose sum depends on the order: ranks are added by a binary tree, on every rank
/// and in every run.
pub fn sums_have_one_order(world: &World) {
    let c = world.communicator();
    let (rank, size) = (c.rank(), c.size());
    let of = |rank: usize, i: usize| {
        ((rank * 7919 + i * 104_729) % 1000) as f32 * 10_f32.powi((rank % 3) as i32 * 3 - 4)
    };
    let len = 10_007;
    let own: Vec<f32> = (0..len * size).map(|i| of(rank, i)).collect();
    let expected: Vec<f32> = (rank * len..(rank + 1) * len)
        .map(|i| Leaves { len: size, num: size }.sum(|rank| (of(rank, i), 1.0)))
        .collect();
    for _ in 0..3 {
        let found = c.start_reduce_scatter(own.clone(), Operation::Sum).unwrap().wait();
        assert!(found[rank * len..][..len].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        let whole = c.start_all_reduce_in_place(own.clone(), Operation::Sum).unwrap().wait();
        assert!(whole[rank * len..][..len].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

/// Ranks that share eight leaves get the sum that one rank forms of all, on one node or on several.
pub fn sums_of_leaves(world: &World) {
    let size = world.size();
    let all = world.communicator().duplicate();
    for per_node in [size, 2, 3, 4] {
        all.set_nodes((0..size).map(|rank| rank / per_node).collect());
        check_choice_between_nodes(&all, per_node);
        check_sums_of_leaves(&all, if per_node == size { 400_003 } else { 7001 });
    }
    // ranks in turns on two nodes
    all.set_nodes((0..size).map(|rank| rank % 2).collect());
    check_sums_of_leaves(&all, 7001);
}

/// Checks that sums go in two levels where that keeps their order, and gathers on any equal nodes.
fn check_choice_between_nodes(all: &Communicator, per_node: usize) {
    let size = all.size();
    let are_equal = per_node > 1 && per_node < size && size.is_multiple_of(per_node);
    let keeps_order = are_equal && per_node.is_power_of_two() && size.is_power_of_two();
    let of_leaves = all.with_subtrees(Subtrees::new(8, size));
    for (collective, element, goes) in [
        (Collective::AllReduce, ElementType::F32, keeps_order),
        (Collective::ReduceScatter, ElementType::F32, keeps_order),
        (Collective::AllReduce, ElementType::Bf16, false),
        (Collective::AllGather, ElementType::Bf16, are_equal),
    ] {
        let chosen = of_leaves.choice(collective, Call::Started, 1 << 20, element).algorithm;
        let what = format!("{collective:?} of {element:?} on {size} ranks, {per_node} a node");
        assert_eq!(chosen == Algorithm::TwoLevel, goes, "{what}: {chosen}");
    }
}

/// Checks the sums of parts of up to `longest` elements.
fn check_sums_of_leaves(c: &Communicator, longest: usize) {
    let leaves = Leaves { len: 8, num: 8 };
    let (rank, size) = (c.rank(), c.size());
    let subtrees = Subtrees::new(leaves.num, size);
    let c = c.with_subtrees(subtrees);
    let of = |leaf: usize, i: usize| ((leaf * 7919 + i * 104_729) % 1009) as f32 / 7.0;
    for part in [0, 1, 13, longest] {
        let len = part * size;
        let mut stack: Vec<Vec<f32>> = Vec::new();
        let own = Section::of_rank(leaves, rank, size);
        for (leaf, step) in own.terms().zip(own.steps()) {
            let mut sums: Vec<f32> = (0..len).map(|i| of(leaf, i)).collect();
            for left in stack.drain(stack.len() - step.num_merges..).rev() {
                sums.iter_mut().zip(left).for_each(|(sum, left)| *sum += left);
            }
            stack.push(sums);
        }
        stack.resize(subtrees.most(), vec![f32::NAN; len]);
        let expected: Vec<u32> = (0..len).map(|i| leaves.sum(|leaf| (of(leaf, i), 1.0)).to_bits()).collect();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let whole = c.start_all_reduce_in_place(stack.concat(), Operation::Sum).unwrap().wait();
        assert!(bits(&whole[..len]) == expected, "all-reduce of {len}");
        let found = c.start_reduce_scatter(stack.concat(), Operation::Sum).unwrap().wait();
        let own = rank * part..(rank + 1) * part;
        assert!(bits(&found[own.clone()]) == expected[own], "reduce-scatter of {len}");
    }
    if subtrees.most() > 1 {
        let refused = c.start_all_reduce_in_place(vec![0.0_f32; 2 * size + 1], Operation::Sum);
        assert!(refused.err().unwrap().to_string().contains("are not 2 sums"));
    }
}

pub fn wrong_lengths(world: &World) {
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

/// Squares that ranks divide have the sum that one rank finds.
pub fn exact_sums(world: &World) {
    let communicator = world.communicator();
    let values: Vec<f32> = (0..5003_u32).map(|i| (i * i % 4099) as f32 * 1e-4 - 0.2).collect();
    let mut expected = ExactSum::default();
    values.iter().for_each(|value| expected.add(f64::from(*value) * f64::from(*value)));
    let mut sum = ExactSum::default();
    sum.add_squares(&values[shard(values.len(), communicator.rank(), communicator.size())]);
    communicator.all_reduce(sum.words_mut(), Operation::Sum).unwrap();
    assert_eq!(sum.value().to_bits(), expected.value().to_bits());
}
