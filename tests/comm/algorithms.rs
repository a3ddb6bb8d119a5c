//! Collective operations by every algorithm.

use clap::ValueEnum as _;
use phalanx::comm::{Algorithm, Call, Choice, Collective, Communicator, Operation, World};
use phalanx::memory::ElementType;

use crate::value;

/// Checks every algorithm at awkward lengths, blocking and not, several at a time, whole and in
/// chunks, on one node and as if on several.
pub fn every_algorithm(world: &World) {
    let all = world.communicator().duplicate();
    let size = all.size();
    let page = 4096 / size_of::<f32>();
    let nodes =
        [vec![0; size], (0..size).map(|rank| rank % 2).collect(), (0..size).map(|rank| rank / 2).collect()];
    for &algorithm in Algorithm::value_variants() {
        let heeds_nodes = algorithm == Algorithm::TwoLevel;
        for nodes in &nodes[..if heeds_nodes { nodes.len() } else { 1 }] {
            all.set_nodes(nodes.clone());
            for len in [0, 1, 7, page - 1, page, page + 1, 3 * page + 5] {
                // MPI cuts as it likes
                let cuts = algorithm != Algorithm::Mpi && len > 7;
                for chunk in if cuts { &[usize::MAX, 4096, 1000][..] } else { &[usize::MAX] } {
                    check_algorithm(&all.using(Choice { algorithm, chunk: *chunk }), algorithm, len);
                }
            }
        }
    }
}

fn check_algorithm(all: &Communicator, algorithm: Algorithm, len: usize) {
    check_choice(all, algorithm, len);
    let (rank, size) = (all.rank(), all.size());
    let mine = |len: usize| -> Vec<f32> { (0..len).map(|at| f32::from(value(rank, at))).collect() };
    let sum = |at: usize| (0..size).map(|rank| f32::from(value(rank, at))).sum::<f32>();
    let sums = |len: usize| (0..len).map(sum).collect::<Vec<f32>>();

    let mut values = mine(len);
    all.all_reduce(&mut values, Operation::Sum).unwrap();
    assert_eq!(values, sums(len), "{algorithm}, blocking, {len}");
    // a NaN on one rank gives a NaN in the sum on every rank, and leaves the elements beside it
    // alone
    let mut values = mine(len);
    values.iter_mut().skip(len / 2).take(usize::from(rank == size - 1)).for_each(|value| *value = f32::NAN);
    let found = all.start_all_reduce_in_place(values, Operation::Sum).unwrap().wait();
    assert!(
        (0..len).all(|at| if at == len / 2 { found[at].is_nan() } else { found[at] == sum(at) }),
        "{algorithm}"
    );
    // MPI does not say which zero or NaN is the minimum or maximum
    for operation in [Operation::Min, Operation::Max] {
        let odd = [0.0, -0.0, 1.0, f32::NAN, 0.0, 0.0, 0.0, 0.0, -0.0, -0.0];
        let of = |rank: usize, at: usize| odd[(rank + at) % odd.len()];
        let values: Vec<f32> = (0..len).map(|at| of(rank, at)).collect();
        let found = all.start_all_reduce_in_place(values, operation).unwrap().wait();
        let expected = |at: usize| {
            let mut terms: Vec<f32> = (0..size).map(|rank| of(rank, at)).collect();
            // −0 comes before 0
            terms.sort_by(f32::total_cmp);
            let end = if operation == Operation::Min { 0 } else { size - 1 };
            if terms.iter().any(|term| term.is_nan()) { f32::NAN } else { terms[end] }
        };
        let is_right = |at: usize| {
            let (found, expected) = (found[at], expected(at));
            let is_open = algorithm == Algorithm::Mpi && (expected.is_nan() || expected == 0.0);
            found.to_bits() == expected.to_bits() || is_open && (expected.is_nan() || found == 0.0)
        };
        assert!((0..len).all(is_right), "{algorithm}, {operation:?}, {len}");
    }
    let several = [len, len + 3, len / 2];
    let pending = several.map(|len| all.start_all_reduce_in_place(mine(len), Operation::Sum).unwrap());
    for (pending, len) in pending.into_iter().zip(several).rev() {
        assert_eq!(pending.wait(), sums(len), "{algorithm}, started, {len}");
    }

    let whole = len * size;
    let own = rank * len..(rank + 1) * len;
    let mut part = vec![0.0; len];
    all.reduce_scatter(&mine(whole), &mut part, Operation::Sum).unwrap();
    assert_eq!(part, sums(whole)[own.clone()], "{algorithm}, blocking, {len}");
    let scattered = all.start_reduce_scatter(mine(whole), Operation::Sum).unwrap();
    let gathered = all.start_all_gather_in_place(mine(whole)).unwrap();
    let owned: Vec<f32> = (0..whole).map(|at| f32::from(value(at / len.max(1), at))).collect();
    assert_eq!(gathered.wait(), owned, "{algorithm}, {len}");
    assert_eq!(scattered.wait()[own.clone()], sums(whole)[own], "{algorithm}, started, {len}");

    for root in 0..size {
        let mut values = mine(len);
        all.broadcast(&mut values, root).unwrap();
        let started = all.start_broadcast(mine(len), root).unwrap().wait();
        for values in [values, started] {
            assert!(
                (0..len).all(|at| values[at] == f32::from(value(root, at))),
                "{algorithm} from {root}, {len}"
            );
        }
    }
}

/// The algorithms that host buffers have for each operation.
const ALGORITHMS: [(Collective, &[Algorithm]); 4] = {
    use Algorithm::{Chain, Direct, Doubling, Halving, Mpi, Pairwise, Ring, Tree, TwoLevel};
    [
        (Collective::AllReduce, &[Mpi, Direct, Pairwise, Ring, Halving, Doubling, TwoLevel]),
        (Collective::ReduceScatter, &[Mpi, Pairwise, Ring, TwoLevel]),
        (Collective::AllGather, &[Mpi, Pairwise, Ring, TwoLevel]),
        (Collective::Broadcast { root: 0 }, &[Mpi, Pairwise, Tree, Chain]),
    ]
};

/// Checks that `algorithm` does every operation that it has, and no other.
fn check_choice(all: &Communicator, algorithm: Algorithm, len: usize) {
    for (collective, algorithms) in ALGORITHMS {
        for call in [Call::Blocking, Call::Started] {
            let is_used = all.choice(collective, call, len, ElementType::F32).algorithm == algorithm;
            let has_it = algorithms.contains(&algorithm);
            assert_eq!(is_used, has_it, "{algorithm} for {collective:?}, {call:?}, {len}");
        }
    }
}

/// Checks 13 MiB by every algorithm and by default, where long operations begin: all forms of the call give
/// the same bits.
pub fn large_buffers(world: &World) {
    let all = world.communicator().duplicate();
    let size = all.size();
    let len = (13 << 20) / size_of::<f32>() / size * size;
    // whole numbers, whose sums are exact in any order, again and again
    let value = |rank: usize, at: usize| ((at + rank) % 1009) as f32;
    let mine = |rank: usize| -> Vec<f32> { (0..len).map(|at| value(rank, at)).collect() };
    let sums: Vec<f32> = (0..1009).map(|at| (0..size).map(|rank| value(rank, at)).sum()).collect();
    let are_sums = |values: &[f32]| values.chunks(1009).all(|found| *found == sums[..found.len()]);
    for &algorithm in Algorithm::value_variants() {
        let all = all.using(Choice { algorithm, chunk: 3 << 20 });
        check_choice(&all, algorithm, len);
        let mut values = mine(all.rank());
        all.all_reduce(&mut values, Operation::Sum).unwrap();
        assert!(are_sums(&values), "{algorithm}");
        if all.rank() + 1 < size {
            values.fill(0.0);
        }
        all.broadcast(&mut values, size - 1).unwrap();
        assert!(are_sums(&values), "{algorithm}");
    }
    let fraction = |at: usize| ((world.rank() * 7919 + at * 31) % 1009) as f32 / 1009.0;
    let mine = || -> Vec<f32> { (0..len).map(fraction).collect() };
    let started = all.start_all_reduce_in_place(mine(), Operation::Sum).unwrap().wait();
    for call in [Call::Started, Call::Blocking] {
        let choice = all.choice(Collective::AllReduce, call, len, ElementType::F32);
        assert_eq!(choice.algorithm, Algorithm::Pairwise);
    }
    let mut blocking = mine();
    all.all_reduce(&mut blocking, Operation::Sum).unwrap();
    let scattered = all.start_reduce_scatter(mine(), Operation::Sum).unwrap().wait();
    let gathered = all.start_all_gather_in_place(scattered).unwrap().wait();
    assert!(started == blocking && blocking == gathered, "the same bits");
    for all in [&all, &all.using(Choice::whole(Algorithm::Pairwise))] {
        let mut part = vec![0.0; len / size];
        all.reduce_scatter(&mine(), &mut part, Operation::Sum).unwrap();
        assert!(part == blocking[all.rank() * part.len()..][..part.len()], "the same bits, cut or not");
    }
    let mut root = blocking.clone();
    all.broadcast(&mut root, 1).unwrap();
    assert!(root == blocking, "the same bits on every rank");
}

/// Checks that ranks may wait for started operations in different orders, and for messages that
/// another rank sends only after a wait of its own: every wait advances all operations.
pub fn waits_in_any_order(world: &World) {
    let all = world.communicator().duplicate();
    let (rank, size) = (all.rank(), all.size());
    let mine = |len: usize| -> Vec<f32> { (0..len).map(|at| f32::from(value(rank, at))).collect() };
    let sums = |len: usize| -> Vec<f32> {
        (0..len).map(|at| (0..size).map(|rank| f32::from(value(rank, at))).sum()).collect()
    };
    // as many rounds as possible, of messages that wait for their receives
    let choices = [Algorithm::Ring, Algorithm::Pairwise, Algorithm::Halving, Algorithm::Doubling];
    for algorithm in choices {
        let all = all.using(Choice { algorithm, chunk: 256 << 10 });
        let lengths = [300_000, 200_000, 100_000].map(|len| len / size * size);
        let mut pending =
            lengths.map(|len| Some((len, all.start_all_reduce_in_place(mine(len), Operation::Sum).unwrap())));
        for turn in 0..lengths.len() {
            let (len, pending) =
                pending[(turn + rank) % lengths.len()].take().expect("each is waited for once");
            assert_eq!(pending.wait(), sums(len), "{algorithm}");
        }

        let len = lengths[0];
        let pending = all.start_all_reduce_in_place(mine(len), Operation::Sum).unwrap();
        let (mut word, is_last) = ([0_u8], rank + 1 == size);
        if is_last && size > 1 {
            // tested, waited for, or blocking: messages that are sent only when rank 0 has the sum
            let mut receiving = all.start_receive(word.to_vec(), 0, 2).unwrap();
            while !receiving.test() {}
            drop(receiving.wait());
            all.start_receive(word.to_vec(), 0, 3).unwrap().wait();
            all.receive(&mut word, 0, 4).unwrap();
            assert_eq!(word, [4]);
        }
        assert_eq!(pending.wait(), sums(len), "{algorithm}");
        if rank == 0 && size > 1 {
            all.send(&[2_u8], size - 1, 2).unwrap();
            all.send(&[3_u8], size - 1, 3).unwrap();
            all.send(&[4_u8], size - 1, 4).unwrap();
        }
    }
}
