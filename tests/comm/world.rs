//! The ranks of a job: its grid, its nodes, and how they agree on an error or end the job.

use phalanx::Error;
use phalanx::comm::{Communicator, Grid, GridShape, SharedMemory, Transfers, World, shared_room};

pub fn agree(world: &World) {
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

pub fn grid(world: &World) {
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
        let (replica, stage_rank, tensor_rank) = shape.coordinates(world.rank());
        let axes: [(&Communicator, &dyn Fn(usize) -> usize); 3] = [
            (&grid.data, &|at| (at * stage + stage_rank) * tensor + tensor_rank),
            (&grid.stage, &|at| (replica * stage + at) * tensor + tensor_rank),
            (&grid.tensor, &|at| (replica * stage + stage_rank) * tensor + at),
        ];
        for (axis, rank_at) in axes {
            let mut ranks = vec![0; axis.size()];
            axis.all_gather(&[world.rank() as i64], &mut ranks).unwrap();
            assert!(ranks.iter().enumerate().all(|(at, rank)| *rank == rank_at(at) as i64), "{ranks:?}");
        }
    }
    let shape = GridShape { data: size, stage: 2, tensor: 1 };
    assert_eq!(Grid::new(world, shape).map(drop).unwrap_err().exit_code(), 2);
}

pub fn node(world: &World) {
    assert_eq!(
        (world.num_nodes(), world.local_rank(), world.num_local_ranks()),
        (1, world.rank(), world.size())
    );
    assert!(!phalanx::comm::library_version().is_empty());
    let (all, node) = (world.communicator(), world.node_communicator());
    for transfers in [Transfers::Aware, Transfers::Staged] {
        all.set_transfers(transfers);
        assert_eq!(node.transfers(), transfers, "the job has one route");
    }
}

/// Every rank of the node reads the words of all. The room of /dev/shm limits several ranks, not one.
pub fn shared_memory(world: &World) {
    let (all, node) = (world.communicator(), world.node_communicator());
    let (rank, size) = (node.rank(), node.size());
    let memory = SharedMemory::new(all, node, size).unwrap();
    memory.write(rank, &[rank as u64 + 7]);
    node.barrier();
    let mut found = vec![0; size];
    memory.read(0, &mut found);
    assert!(found.into_iter().eq(7..size as u64 + 7));

    let too_many = shared_room().filter(|room| size > 1 || *room < 1 << 28).map(|room| room / 4);
    match too_many.map(|num_words| SharedMemory::new(all, node, num_words)) {
        None => println!("SKIPPED: the room for shared memory is unknown, or too large to be exceeded"),
        Some(outcome) if size == 1 => assert!(outcome.unwrap().words().len() > size),
        Some(outcome) => assert!(outcome.unwrap_err().to_string().contains("/dev/shm has")),
    }
}

pub fn panic_on_the_last(world: &World) {
    if world.rank() + 1 == world.size() {
        panic!("rank {} has had enough", world.rank());
    }
    world.communicator().barrier();
}
