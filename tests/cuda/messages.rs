//! Every operation on device buffers, staged and CUDA-aware, by every algorithm. The device has
//! pending work on the buffers before, which messages must wait for, and gets work after, which
//! must wait for the messages.

use clap::ValueEnum as _;
use phalanx::comm::{
    Algorithm, Awareness, Choice, Collective, Communicator, Front, Grid, GridShape, Operation, Transfers,
    World, awareness,
};
use phalanx::device::prelude::*;
use phalanx::device::{Cuda, CudaBuffer, Precision, Role};
use phalanx::memory::{Buffer as _, ElementType};
use phalanx::sums::Leaves;
use phalanx::train::map_peers;

use crate::support::equivalence::TestDevice;

/// Runs `check` with CUDA-aware messages if MPI supports them, which every MPI does on the
/// emulator, whose device memory is host memory.
pub fn aware(world: &World, check: fn(&World)) {
    if routes().contains(&Transfers::Aware) {
        world.communicator().set_transfers(Transfers::Aware);
        check(world);
    }
}

/// Runs `check` with ranks that map each other's device memory. Staged messages are left for the operations
/// that do not use that.
pub fn ipc(world: &World, check: fn(&World)) {
    map_peers(world, Cuda::shared()).unwrap();
    assert!(world.communicator().maps_peers() || world.size() == 1);
    check(world);
}

/// Checks all operations of ranks that map each other's device memory: on one device, and, because
/// leaders of devices share the work, as if ranks took turns on two and had one each.
pub fn every_operation_by_ipc(world: &World) {
    let all = world.communicator();
    let bf16 = Cuda::open(0, Precision::Bf16).unwrap();
    map_peers(world, Cuda::shared()).unwrap();
    for num_devices in [1, 2, all.size()] {
        all.set_devices((0..all.size()).map(|rank| (rank % num_devices) as u128).collect());
        let messages = all.duplicate();
        let choice =
            messages.choice(Collective::AllReduce, messages.call_on::<CudaBuffer>(), 1, ElementType::Bf16);
        assert_eq!(choice.algorithm == Algorithm::Ipc, all.size() > 1);
        for len in [0, 1, 7, 1023, 1024, 1025, 3000] {
            operations(Cuda::shared(), Role::Exact, &messages, len);
            operations(&bf16, Role::Activations, &messages, len);
        }
        // long enough for several leaders
        operations(Cuda::shared(), Role::Exact, &messages, 70_001);
        same_bits(Cuda::shared(), Role::Exact, all, &[Transfers::Staged]);
        same_bits(&bf16, Role::Activations, all, &[Transfers::Staged]);
        large(Cuda::shared(), &messages, (1 << 20) / all.size() * all.size());
    }
    refused(Cuda::shared(), &all.duplicate(), all);
    if all.size() > 1 {
        assert_eq!(allocations_for_messages(all), 0, "messages are copies in device memory");
        assert!(allocations_for_messages(&all.through_host()) > 0, "these have memory on the host");
    }
    // ranks of several nodes exchange messages too, and those of one of these nodes do not
    let (spread, node) = (all.duplicate(), all.split(all.rank() / 2, all.rank()).unwrap());
    spread.set_nodes((0..all.size()).map(|rank| rank / 2).collect());
    assert_eq!(spread.maps_peers(), all.size() == 2);
    assert_eq!(node.maps_peers(), node.size() == 2);
    operations(Cuda::shared(), Role::Exact, &spread, 1025);
    operations(Cuda::shared(), Role::Exact, &node, 1025);
    all.set_devices(Vec::new());
    assert!(!all.maps_peers());
}

/// Checks operations over several nodes, whose ranks map each other's device memory: that sums have the bits
/// of messages between all ranks, and the others the right values. As if each node had one device and two,
/// and with messages by either route.
pub fn operations_over_nodes_by_ipc(world: &World) {
    let all = world.communicator();
    let (rank, size, device) = (all.rank(), all.size(), Cuda::shared());
    let bf16 = Cuda::open(0, Precision::Bf16).unwrap();
    map_peers(world, device).unwrap();
    let call = all.call_on::<CudaBuffer>();
    let term = |at: usize| 1000.0 / (rank * 7 + at % 4099 + 1) as f32 - at as f32 / 3.0;
    let terms = |len: usize| written(device, Role::Exact, len, term);
    for (on_node, num_devices) in [(2, 1), (2, 2), (4, 1), (4, 2), (3, 1)] {
        if on_node == size || !size.is_multiple_of(on_node) {
            continue;
        }
        all.set_devices((0..size).map(|rank| (rank % on_node % num_devices) as u128).collect());
        let spread = all.duplicate();
        spread.set_nodes((0..size).map(|rank| rank / on_node * on_node).collect());
        let is_ipc =
            |collective, element| spread.choice(collective, call, size, element).algorithm == Algorithm::Ipc;
        for collective in [Collective::AllReduce, Collective::ReduceScatter] {
            let is_subtree = on_node != 3;
            assert_eq!(is_ipc(collective, ElementType::F32), is_subtree, "a sum of three is no subtree");
            assert!(!is_ipc(collective, ElementType::Bf16), "it would round twice");
        }
        for collective in [Collective::AllGather, Collective::Broadcast { root: 0 }] {
            assert!(
                [ElementType::F32, ElementType::Bf16].map(|element| is_ipc(collective, element)) == [true; 2]
            );
        }
        for &transfers in routes() {
            all.set_transfers(transfers);
            // in several chunks, of several leaders, of one, and fewer elements than leaders
            for len in [if size == 4 { 2_500_001 } else { 70_000 }, 70_001, 1025, 7, 1, 0] {
                let case = format!(
                    "{len} elements, {on_node} ranks on a node, {num_devices} devices, {transfers:?}"
                );
                let all_reduced = |by: &Communicator| {
                    let sum = by.start_all_reduce_in_place(terms(len), Operation::Sum).unwrap().wait();
                    found(device, Role::Exact, &sum, len)
                };
                let scattered = |by: &Communicator| {
                    let sum = by.start_reduce_scatter(terms(len * size), Operation::Sum).unwrap().wait();
                    found(device, Role::Exact, &sum, len * size)[rank * len..(rank + 1) * len].to_vec()
                };
                for sum in [&all_reduced as &dyn Fn(&Communicator) -> Vec<f32>, &scattered] {
                    let [by_ipc, by_messages] = [sum(&spread), sum(&spread.through_host())];
                    let is_same = |(one, other): (&f32, &f32)| one.to_bits() == other.to_bits();
                    assert!(by_ipc.iter().zip(&by_messages).all(is_same), "{case}");
                }
                if len == 2_500_001 {
                    // in chunks: parts with gaps, and a chain
                    large(device, &spread, 10_000_000);
                    let (root, mine) = (size - 1, filled(device, Role::Exact, rank, len));
                    let sent = spread.start_broadcast(mine, root).unwrap().wait();
                    let found = found(device, Role::Exact, &sent, len);
                    assert!((0..len).all(|at| found[at] == value(root, at)), "{case}");
                }
                if len <= 70_000 {
                    operations(device, Role::Exact, &spread, len);
                    operations(&bf16, Role::Activations, &spread, len);
                }
            }
        }
    }
    all.set_devices(Vec::new());
    all.set_transfers(Transfers::Staged);
}

/// Sends more values than there is room for to a rank that maps this one's memory.
pub fn too_long(world: &World) {
    let (all, device) = (world.communicator(), Cuda::shared());
    map_peers(world, device).unwrap();
    let buffer = filled(device, Role::Exact, all.rank(), if all.is_root() { 5 } else { 3 });
    match all.is_root() {
        true => all.start_send(buffer, 1, 0).unwrap().wait(),
        false => all.start_receive(buffer, 0, 0).unwrap().wait(),
    };
}

/// Adds up `last` values on the last of three ranks, and 3 on the others, as if the second had a device of
/// its own.
pub fn sum_of_other_lengths(world: &World, last: usize) {
    let (all, device) = (world.communicator(), Cuda::shared());
    map_peers(world, device).unwrap();
    all.set_devices(vec![0, 1, 0]);
    let buffer = filled(device, Role::Exact, all.rank(), if all.rank() == 2 { last } else { 3 });
    all.start_all_reduce_in_place(buffer, Operation::Sum).unwrap().wait();
}

/// Returns the number of times that messages of a rank to the next allocate memory.
fn allocations_for_messages(all: &Communicator) -> u64 {
    let (device, rank, size) = (Cuda::shared(), all.rank(), all.size());
    let [sent, received] = [(); 2].map(|()| filled(device, Role::Exact, rank, 1000));
    let before = device.counters().allocations;
    let receiving = all.start_receive(received, (rank + size - 1) % size, 0).unwrap();
    let sending = all.start_send(sent, (rank + 1) % size, 0).unwrap();
    drop((receiving.wait(), sending.wait()));
    device.counters().allocations - before
}

/// Returns the routes of messages that this MPI has.
fn routes() -> &'static [Transfers] {
    if Cuda::shared().name().starts_with("Emulated") || matches!(awareness(), Awareness::Yes(_)) {
        return &[Transfers::Staged, Transfers::Aware];
    }
    println!("SKIPPED: this MPI does not take the memory of a GPU");
    &[Transfers::Staged]
}

/// Returns element `at` of rank `rank`: a small whole number; sums of these are exact in bfloat16
/// too.
fn value(rank: usize, at: usize) -> f32 {
    ((rank * 3 + at * 5) % 7 + 1) as f32
}

/// Returns a buffer with value `value(i)` in element i.
fn written(device: &Cuda, role: Role, len: usize, value: impl Fn(usize) -> f32) -> CudaBuffer {
    let mut buffer = device.allocate(len, role).unwrap();
    let mut write = |values: &mut [f32]| {
        values.iter_mut().enumerate().for_each(|(at, into)| *into = value(at));
        Ok(())
    };
    device.write(device.view_mut(&mut buffer, 0..len), &mut write).unwrap();
    buffer
}

/// Returns a buffer with this rank's values, which the device has still to write.
fn filled(device: &Cuda, role: Role, rank: usize, len: usize) -> CudaBuffer {
    let from = written(device, role, len, |at| value(rank, at));
    let mut into = device.allocate(len, role).unwrap();
    device.fill(device.view_mut(&mut into, 0..len), f32::NAN);
    device.copy(device.view(&from, 0..len), device.view_mut(&mut into, 0..len));
    // freeing it would wait for the copy
    std::mem::forget(from);
    into
}

/// Returns the values that work started now finds in a buffer.
fn found(device: &Cuda, role: Role, buffer: &CudaBuffer, len: usize) -> Vec<f32> {
    let mut copy = device.allocate(len, role).unwrap();
    device.copy(device.view(buffer, 0..len), device.view_mut(&mut copy, 0..len));
    let mut found = Vec::new();
    let mut look = |values: &[f32]| {
        found.extend_from_slice(values);
        Ok(())
    };
    device.read(device.view(&copy, 0..len), &mut look).unwrap();
    found
}

/// The algorithms that device buffers have for each operation on values of a type.
const ALGORITHMS: [(Collective, ElementType, &[Algorithm]); 5] = {
    use Algorithm::{Chain, Direct, Doubling, Halving, Mpi, Pairwise, Ring, Tree, TwoLevel};
    use Collective::{AllGather, AllReduce, Broadcast, ReduceScatter};
    use ElementType::{Bf16, F32};
    [
        (AllReduce, F32, &[Mpi, Direct, Pairwise, Ring, Halving, Doubling, TwoLevel]),
        (AllReduce, Bf16, &[Direct, Pairwise, Ring, Halving, Doubling, TwoLevel]),
        (ReduceScatter, F32, &[Pairwise, Ring, TwoLevel]),
        (AllGather, F32, &[Mpi, Pairwise, Ring, TwoLevel]),
        (Broadcast { root: 0 }, F32, &[Mpi, Pairwise, Tree, Chain]),
    ]
};

/// Checks all operations, for values kept in `f32` and in bfloat16.
pub fn every_operation(world: &World) {
    let all = world.communicator();
    let bf16 = Cuda::open(0, Precision::Bf16).unwrap();
    let routes = routes();
    for &transfers in routes {
        all.set_transfers(transfers);
        // MPI's own may crash on device memory
        let is_sound =
            |algorithm: &&Algorithm| **algorithm != Algorithm::Mpi || transfers == Transfers::Staged;
        let plans = Algorithm::value_variants().iter().filter(is_sound);
        let choices = plans.map(|&algorithm| Some(Choice { algorithm, chunk: 1000 }));
        for choice in std::iter::once(None).chain(choices) {
            let messages = all.duplicate();
            messages.set_nodes((0..all.size()).map(|rank| rank / 2).collect());
            let device = choice.map(|choice| messages.using(choice)).unwrap_or(messages);
            for (collective, element, algorithms) in ALGORITHMS {
                let used = device.choice(collective, device.call_on::<CudaBuffer>(), 3000, element).algorithm;
                let asked = choice.filter(|asked| algorithms.contains(&asked.algorithm));
                assert!(asked.is_none_or(|asked| asked.algorithm == used), "{used} in place of {asked:?}");
            }
            for len in [0, 1, 7, 1023, 1024, 1025, 3000] {
                operations(Cuda::shared(), Role::Exact, &device, len);
                operations(&bf16, Role::Activations, &device, len);
            }
        }
    }
    same_bits(Cuda::shared(), Role::Exact, all, routes);
    same_bits(&bf16, Role::Activations, all, routes);
    if routes.contains(&Transfers::Aware) && all.size() > 1 {
        all.set_transfers(Transfers::Aware);
        stays_after_messages(Cuda::shared(), all);
    }
    // the node, and a grid that was made before the route was decided, take it too
    let grid = Grid::new(world, GridShape::data(all.size())).unwrap();
    for transfers in [Transfers::Aware, Transfers::Staged] {
        all.set_transfers(transfers);
        assert_eq!([&grid.data, world.node_communicator()].map(Communicator::transfers), [transfers; 2]);
        assert_eq!(grid.data.through_host().transfers(), Transfers::Staged);
    }
    let messages = all.duplicate();
    large(Cuda::shared(), &messages, (6 << 20) / all.size() * all.size());
    refused(Cuda::shared(), &messages, all);
}

/// Checks that memory that MPI was lent is not freed: the next buffer of its length takes it.
fn stays_after_messages(device: &Cuda, all: &Communicator) {
    let buffer = filled(device, Role::Exact, all.rank(), 4321);
    drop(all.start_all_reduce_in_place(buffer, Operation::Sum).unwrap().wait());
    let before = device.counters().allocations;
    drop(device.allocate(4321, Role::Exact).unwrap());
    assert_eq!(device.counters().allocations, before, "the memory of a buffer that was sent is still there");
}

fn operations(device: &Cuda, role: Role, all: &Communicator, len: usize) {
    let (rank, size) = (all.rank(), all.size());
    let mine = |len: usize| filled(device, role, rank, len);
    let look = |buffer: &CudaBuffer, len: usize| found(device, role, buffer, len);
    let sums =
        |len: usize| -> Vec<f32> { (0..len).map(|at| (0..size).map(|rank| value(rank, at)).sum()).collect() };
    let of = |rank: usize, len: usize| -> Vec<f32> { (0..len).map(|at| value(rank, at)).collect() };

    // three at once, and each rank waits first for a different one
    let several = [len, len + 5, len / 2];
    let mut started =
        several.map(|len| Some((len, all.start_all_reduce_in_place(mine(len), Operation::Sum).unwrap())));
    for turn in 0..several.len() {
        let (len, transfer) = started[(turn + rank) % several.len()].take().expect("each is waited for once");
        assert_eq!(look(&transfer.wait(), len), sums(len), "all-reduce of {len}");
    }
    let whole = len * size;
    let own = rank * len..(rank + 1) * len;
    let scattered = all.start_reduce_scatter(mine(whole), Operation::Sum).unwrap();
    let gathered = all.start_all_gather_in_place(mine(whole)).unwrap();
    let owned: Vec<f32> = (0..whole).map(|at| value(at / len.max(1), at)).collect();
    assert_eq!(look(&gathered.wait(), whole), owned, "all-gather of {len}");
    let scattered = look(&scattered.wait(), whole);
    assert_eq!(scattered[own.clone()], sums(whole)[own], "reduce-scatter of {len}");

    for root in [0, size - 1] {
        let sent = all.start_broadcast(mine(len), root).unwrap().wait();
        assert_eq!(look(&sent, len), of(root, len), "broadcast of {len}");
    }
    if size > 1 {
        let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
        // the first part of a longer buffer, into one that is longer too; the rest stays unchanged
        let receiving = all.start_receive(mine(len + 40), previous, 7).unwrap();
        let sending = all.start_send(Front { buffer: mine(len + 3), len }, next, 7).unwrap();
        let mut expected = of(previous, len);
        expected.extend(&of(rank, len + 40)[len..]);
        assert_eq!(look(&receiving.wait(), len + 40), expected, "received {len}");
        assert_eq!(look(&sending.wait().buffer, len + 3), of(rank, len + 3), "sent {len}");

        // two in turn into one buffer, which the device writes before the first and reads between
        // the two
        let first = all.start_send(filled(device, role, rank, len), next, 8).unwrap();
        let second = all.start_send(filled(device, role, rank + 1, len / 2), next, 8).unwrap();
        let received = all.start_receive(mine(len), previous, 8).unwrap().wait();
        let mut between = device.allocate(len, role).unwrap();
        device.copy(device.view(&received, 0..len), device.view_mut(&mut between, 0..len));
        let received = Front { buffer: received, len: len / 2 };
        let received = all.start_receive(received, previous, 8).unwrap().wait().buffer;
        assert_eq!(look(&between, len), of(previous, len), "the first of two messages, {len}");
        let mut both = of(previous, len);
        both[..len / 2].copy_from_slice(&of(previous + 1, len / 2));
        assert_eq!(look(&received, len), both, "both messages, {len}");
        drop((first.wait(), second.wait()));
    }
}

/// Checks sums that are rounded: the host's and the device's have the same bits, those of adding up
/// in `f32` by a binary tree over the ranks. Subnormal numbers are the exception, which the programs
/// let the CPU take for zero.
fn same_bits(device: &Cuda, role: Role, all: &Communicator, routes: &[Transfers]) {
    let term = |rank: usize, at: usize| {
        (1000.0 / (rank + 3 * at + 1) as f32) * if at.is_multiple_of(2) { 1.0 } else { -1.0 }
    };
    // several chunks of the default size
    let len = if all.size() == 3 { 3_000_001 } else { 1001 };
    let terms = |rank: usize| written(device, role, len, |at| term(rank, at));
    let look = |buffer: &CudaBuffer| found(device, role, buffer, len);
    let kept: Vec<Vec<f32>> = (0..all.size()).map(|rank| look(&terms(rank))).collect();
    let order = Leaves { len: all.size(), num: all.size() };
    let sums: Vec<f32> = (0..len).map(|at| order.sum(|rank| (kept[rank][at], 1.0))).collect();
    let is_wide = terms(0).element_type() == ElementType::F32;
    let rounded = |exact: &f32| {
        let up = exact.to_bits() + 0x7fff + (exact.to_bits() >> 16 & 1);
        if is_wide { exact.to_bits() } else { up & 0xffff_0000 }
    };
    for &transfers in routes {
        all.set_transfers(transfers);
        let messages = all.duplicate();
        let sum = messages.start_all_reduce_in_place(terms(all.rank()), Operation::Sum).unwrap().wait();
        let is_right = |(found, exact): (&f32, &f32)| found.to_bits() == rounded(exact);
        assert!(look(&sum).iter().zip(&sums).all(is_right), "{transfers:?}, {role:?}");
    }
}

/// Checks chunks of the default size: both forms of the sum give the same bits.
fn large(device: &Cuda, all: &Communicator, len: usize) {
    let mine = || filled(device, Role::Exact, all.rank(), len);
    let reduced = all.start_all_reduce_in_place(mine(), Operation::Sum).unwrap().wait();
    let scattered = all.start_reduce_scatter(mine(), Operation::Sum).unwrap().wait();
    let gathered = all.start_all_gather_in_place(scattered).unwrap().wait();
    let [reduced, gathered] = [reduced, gathered].map(|buffer| found(device, Role::Exact, &buffer, len));
    let sum = |at: usize| (0..all.size()).map(|rank| value(rank, at)).sum::<f32>();
    assert!(reduced.iter().enumerate().all(|(at, found)| *found == sum(at)));
    assert!(reduced == gathered);
}

fn refused(device: &Cuda, messages: &Communicator, all: &Communicator) {
    let size = all.size();
    let buffer = || filled(device, Role::Exact, 0, size + 1);
    assert!(messages.start_send(buffer(), size, 0).is_err(), "there is no such rank");
    assert!(messages.start_broadcast(buffer(), size).is_err(), "there is no such root");
    let outcome = messages.start_all_reduce_in_place(buffer(), Operation::Max);
    assert!(outcome.is_err(), "a device supports sums only");
    let outcome = messages.start_all_gather_in_place(buffer());
    assert!(size == 1 || outcome.is_err(), "there is no part for each rank");
}
