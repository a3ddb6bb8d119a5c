//! Every plan, run on all ranks against each other without MPI: messages match, no rank waits for
//! ever although nothing is buffered, and the values are right to the bit.

use std::collections::VecDeque;
use std::ops::Range;

use clap::ValueEnum as _;

use super::{Algorithm, Collective, Cut, Plan, Ranks, plan};
use crate::sums::{Leaves, Subtrees, shard};

/// A message; the queue that holds it determines the receiver.
struct Message {
    values: Vec<f32>,
    is_taken: std::rc::Rc<std::cell::Cell<bool>>,
}

struct Rank {
    plan: Plan,
    values: Vec<f32>,
    inbox: Vec<f32>,
    round: usize,
    /// The messages that the rank has sent in its round; `None` before the round begins.
    sent: Option<Vec<std::rc::Rc<std::cell::Cell<bool>>>>,
}

/// Runs all ranks to their ends for one chunk.
fn run(ranks: &mut [Rank], cut: &Cut, chunk: usize) {
    let size = ranks.len();
    let mut links: Vec<VecDeque<Message>> = (0..size * size).map(|_| VecDeque::new()).collect();
    loop {
        let mut moved = false;
        for rank in 0..size {
            let state = &mut ranks[rank];
            let Some(round) = state.plan.rounds.get(state.round).cloned() else { continue };
            if state.sent.is_none() {
                let mut sent = Vec::new();
                for send in &round.sends {
                    for range in cut.pieces(chunk, &send.parts) {
                        let is_taken = std::rc::Rc::<std::cell::Cell<bool>>::default();
                        sent.push(is_taken.clone());
                        let from = send.subtree * cut.len();
                        let values = state.values[from + range.start..from + range.end].to_vec();
                        links[rank * size + send.to].push_back(Message { values, is_taken });
                        for receive in round.receives.iter().filter(|receive| receive.inbox.is_none()) {
                            for into in cut.pieces(chunk, &receive.parts) {
                                assert!(!overlap(&range, &into), "{into:?} is received into and sent from");
                            }
                        }
                    }
                }
                state.sent = Some(sent);
                moved = true;
            }
            let num_pieces = |from: usize| {
                let of = round.receives.iter().filter(|receive| receive.from == from);
                of.map(|receive| cut.pieces(chunk, &receive.parts).count()).sum::<usize>()
            };
            let arrived =
                round.receives.iter().all(|r| links[r.from * size + rank].len() >= num_pieces(r.from));
            if !arrived {
                continue;
            }
            for receive in &round.receives {
                let mut at = receive.inbox.unwrap_or_default() * cut.largest_part();
                for range in cut.pieces(chunk, &receive.parts) {
                    let message = links[receive.from * size + rank].pop_front().unwrap();
                    message.is_taken.set(true);
                    assert_eq!(message.values.len(), range.len(), "both sides agree on the length");
                    if receive.inbox.is_some() {
                        state.inbox[at..at + range.len()].copy_from_slice(&message.values);
                        at += range.len();
                    } else {
                        state.values[range].copy_from_slice(&message.values);
                    }
                    moved = true;
                }
            }
            // what is received is received once
            let mut waiting = round.clone();
            waiting.receives.clear();
            state.plan.rounds[state.round] = waiting;
            if !state.sent.iter().flatten().all(|is_taken| is_taken.get()) {
                continue;
            }
            for combine in &round.combines {
                let stride = combine.parts.len() * cut.largest_part();
                let first = combine.inbox * cut.largest_part();
                for range in cut.pieces(chunk, &combine.parts) {
                    for (offset, at) in range.enumerate() {
                        let received =
                            (0..combine.num_received).map(|term| state.inbox[first + term * stride + offset]);
                        let own =
                            (0..combine.own.len()).map(|subtree| state.values[subtree * cut.len() + at]);
                        let mut terms: Vec<f32> = received.collect();
                        terms.splice(combine.own.start..combine.own.start, own);
                        let mut stack = Vec::new();
                        for (mut sum, num) in terms.into_iter().zip(combine.merges.iter()) {
                            (0..*num).for_each(|_| sum += stack.pop().unwrap());
                            stack.push(sum);
                        }
                        assert_eq!(stack.len(), 1);
                        state.values[at] = stack[0];
                    }
                }
            }
            (state.round, state.sent, moved) = (state.round + 1, None, true);
        }
        if !moved {
            break;
        }
    }
    assert!(ranks.iter().all(|rank| rank.round == rank.plan.rounds.len()), "every rank comes to its end");
    assert!(links.iter().all(VecDeque::is_empty), "every message is received");
}

fn overlap(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

fn value(rank: usize, at: usize) -> f32 {
    ((rank * 7919 + at * 104_729) % 1_000_003) as f32 / 1_000_003.0 - 0.5
}

/// Runs an operation on all ranks and returns their values.
fn perform(
    collective: Collective,
    algorithm: Algorithm,
    nodes: &[usize],
    len: usize,
    chunk: usize,
) -> Vec<Vec<f32>> {
    let size = nodes.len();
    let start = |rank: usize| (0..len).map(|at| value(rank, at)).collect::<Vec<f32>>();
    let values = (0..size).map(start).collect();
    perform_on(collective, algorithm, nodes, Subtrees::one_each(size), len, chunk, values)
}

/// Runs an operation on the values of all ranks, each an array of `len` elements for each subtree.
fn perform_on(
    collective: Collective,
    algorithm: Algorithm,
    nodes: &[usize],
    subtrees: Subtrees,
    len: usize,
    chunk: usize,
    mut values: Vec<Vec<f32>>,
) -> Vec<Vec<f32>> {
    let size = nodes.len();
    let is_owned = matches!(collective, Collective::ReduceScatter | Collective::AllGather);
    let plan_of = |rank| plan(collective, algorithm, Ranks { rank, subtrees, nodes });
    let plans: Vec<Plan> = (0..size).map(plan_of).collect();
    let cut = Cut::new(len, plans[0].parts, chunk, is_owned);
    for chunk in 0..cut.chunks() {
        let make = |(plan, values): (&Plan, &Vec<f32>)| {
            let inbox = vec![f32::NAN; plan.inbox * cut.largest_part()];
            Rank { plan: plan.clone(), values: values.clone(), inbox, round: 0, sent: None }
        };
        let mut ranks: Vec<Rank> = plans.iter().zip(&values).map(make).collect();
        run(&mut ranks, &cut, chunk);
        values = ranks.into_iter().map(|rank| rank.values).collect();
    }
    values
}

fn layouts() -> Vec<Vec<usize>> {
    let one_node = (1..=17).map(|size| vec![0; size]);
    let several =
        [vec![0, 0, 1, 1], vec![0, 1, 0, 1, 0, 1], vec![0, 0, 1], vec![2, 2, 2, 5, 5, 5], (0..8).collect()];
    one_node.chain(several).collect()
}

const LENGTHS: [(usize, usize); 7] = [(0, 8), (1, 8), (2, 1), (5, 100), (17, 17), (97, 13), (120, 1000)];

#[test]
fn every_sum_is_right_and_the_same_on_every_rank() {
    for nodes in layouts() {
        for &algorithm in Algorithm::value_variants() {
            if !algorithm.plans(Collective::AllReduce) {
                continue;
            }
            for (len, chunk) in LENGTHS {
                let results = perform(Collective::AllReduce, algorithm, &nodes, len, chunk);
                for (at, first) in results[0].iter().enumerate() {
                    let exact: f64 = (0..nodes.len()).map(|rank| f64::from(value(rank, at))).sum();
                    assert!(
                        (f64::from(*first) - exact).abs() < 1e-5,
                        "{algorithm} of {nodes:?}, {len} by {chunk}"
                    );
                    assert!(
                        results.iter().all(|other| other[at].to_bits() == first.to_bits()),
                        "{algorithm}"
                    );
                }
            }
        }
    }
}

#[test]
fn any_number_of_ranks_sums_the_leaves_in_one_order() {
    let len = 34;
    for num_leaves in [1, 5, 8, 12, 16] {
        let leaves = Leaves { len: num_leaves, num: num_leaves };
        let total = |at: usize| leaves.sum(|leaf| (value(leaf, at), 1.0));
        let expected: Vec<u32> = (0..len).map(|at| total(at).to_bits()).collect();
        for size in 1..=num_leaves + 2 {
            let subtrees = Subtrees::new(num_leaves, size);
            // the sums of a rank, then what nobody may use
            let of_rank = |rank: usize| {
                let stack = stack_of(shard(num_leaves, rank, size), num_leaves, len);
                assert_eq!(stack.len(), subtrees.of_rank(rank));
                let mut values = stack.concat();
                values.resize(subtrees.most() * len, f32::NAN);
                values
            };
            let values: Vec<Vec<f32>> = (0..size).map(of_rank).collect();
            for algorithm in [Algorithm::Direct, Algorithm::Pairwise] {
                for chunk in [7, 100] {
                    let all = Collective::AllReduce;
                    let sums =
                        perform_on(all, algorithm, &vec![0; size], subtrees, len, chunk, values.clone());
                    for sums in sums {
                        let found: Vec<u32> = sums[..len].iter().map(|sum| sum.to_bits()).collect();
                        assert_eq!(found, expected, "{algorithm}, {num_leaves} leaves on {size} ranks");
                    }
                }
            }
        }
    }
}

/// Adds up consecutive leaves of `len` sums as far as they are whole subtrees of `num_leaves` leaves.
fn stack_of(leaves: Range<usize>, num_leaves: usize, len: usize) -> Vec<Vec<f32>> {
    let mut stack: Vec<(Range<usize>, Vec<f32>)> = Vec::new();
    for leaf in leaves {
        let mut own = (leaf..leaf + 1, (0..len).map(|at| value(leaf, at)).collect::<Vec<f32>>());
        while let Some((before, values)) = stack.pop_if(|(before, _)| {
            let is_last = own.0.end == num_leaves;
            before.start.is_multiple_of(2 * before.len())
                && (own.0.len() == before.len() || is_last && own.0.len() < before.len())
        }) {
            own.1.iter_mut().zip(values).for_each(|(right, left)| *right += left);
            own.0.start = before.start;
        }
        stack.push(own);
    }
    stack.into_iter().map(|(_, values)| values).collect()
}

#[test]
fn every_rank_gets_its_part() {
    for nodes in layouts() {
        let size = nodes.len();
        for algorithm in [Algorithm::Pairwise, Algorithm::Ring, Algorithm::TwoLevel] {
            for (part, chunk) in LENGTHS {
                let len = part * size;
                let sums = perform(Collective::ReduceScatter, algorithm, &nodes, len, chunk);
                let gathered = perform(Collective::AllGather, algorithm, &nodes, len, chunk);
                for rank in 0..size {
                    for (at, sum) in sums[rank].iter().enumerate().skip(rank * part).take(part) {
                        let exact: f64 = (0..size).map(|rank| f64::from(value(rank, at))).sum();
                        assert!((f64::from(*sum) - exact).abs() < 1e-5, "{algorithm} of {size}, {len}");
                    }
                    let expected: Vec<f32> = (0..len).map(|at| value(at / part.max(1), at)).collect();
                    assert_eq!(gathered[rank], expected, "{algorithm} of {size}, {len}");
                }
            }
        }
    }
}

#[test]
fn every_root_reaches_every_rank() {
    for nodes in layouts() {
        for root in 0..nodes.len() {
            for algorithm in [Algorithm::Tree, Algorithm::Chain, Algorithm::Pairwise] {
                for (len, chunk) in LENGTHS {
                    let expected: Vec<f32> = (0..len).map(|at| value(root, at)).collect();
                    let results = perform(Collective::Broadcast { root }, algorithm, &nodes, len, chunk);
                    assert!(
                        results.iter().all(|values| *values == expected),
                        "{algorithm} from {root} of {nodes:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn two_levels_sum_in_the_order_of_all_ranks() {
    let in_order = [(2, 2), (3, 2), (3, 4), (5, 1), (2, 8)].map(|(num_nodes, per_node)| -> Vec<usize> {
        (0..num_nodes * per_node).map(|rank| rank / per_node).collect()
    });
    // as of ranks that play each other's parts in an audit
    let shifted = [vec![6, 6, 0, 0, 2, 2, 4, 4], vec![4, 4, 0, 0, 2, 2]];
    for nodes in in_order.into_iter().chain(shifted) {
        for collective in [Collective::AllReduce, Collective::ReduceScatter] {
            let len = 3 * nodes.len();
            let sums = |algorithm| perform(collective, algorithm, &nodes, len, 2);
            let (found, expected) = (sums(Algorithm::TwoLevel), sums(Algorithm::Pairwise));
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let [_, changed] = collective.ranges(rank, nodes.len(), len);
                assert_eq!(found[changed.clone()], expected[changed], "{collective:?} of {nodes:?}");
            }
        }
    }
}

#[test]
fn two_levels_send_less_between_nodes() {
    let nodes = [0, 0, 0, 0, 1, 1, 1, 1];
    let cut = Cut::new(800, 8, 800, false);
    let crossing = |collective: Collective, algorithm: Algorithm| -> usize {
        let of_rank = |rank: usize| -> usize {
            let ranks = Ranks { rank, subtrees: Subtrees::one_each(8), nodes: &nodes };
            let plan = plan(collective, algorithm, ranks);
            let sends = plan.rounds.iter().flat_map(|round| &round.sends);
            let crossing = sends.filter(|send| nodes[send.to] != nodes[rank]);
            crossing.flat_map(|send| cut.pieces(0, &send.parts)).map(|range| range.len()).sum()
        };
        (0..8).map(of_rank).sum()
    };
    let halves = [Collective::ReduceScatter, Collective::AllGather];
    for (collective, times) in [(Collective::AllReduce, 2), (halves[0], 1), (halves[1], 1)] {
        let found =
            [Algorithm::Pairwise, Algorithm::TwoLevel].map(|algorithm| crossing(collective, algorithm));
        assert_eq!(found, [times * 8 * 400, times * 8 * 100], "{collective:?}");
    }
}

#[test]
fn parts_with_gaps_are_moved_apart() {
    for (len, parts, chunk) in [(12, 3, 100), (60, 4, 7), (7, 1, 2)] {
        let cut = Cut::new(len, parts, chunk, true);
        let apart = cut.starting_at(5).with_gaps(9);
        let mut seen = vec![];
        for chunk in 0..cut.chunks() {
            for part in 0..parts {
                let (one, shift) = (part..part + 1, 5 + part * 9);
                let moved = cut.pieces(chunk, &one).map(|piece| piece.start + shift..piece.end + shift);
                assert!(apart.pieces(chunk, &one).eq(moved), "chunk {chunk} of part {part} of {parts}");
            }
            seen.extend(apart.all_pieces(chunk).flatten());
        }
        let of_part = |part: usize| (0..len / parts).map(move |at| 5 + part * (len / parts + 9) + at);
        seen.sort_unstable();
        assert!(seen.into_iter().eq((0..parts).flat_map(of_part)), "{parts} parts of {len}");
    }
}

#[test]
fn a_long_buffer_has_no_more_chunks_than_tags() {
    for is_owned in [true, false] {
        let cut = Cut::new(1 << 40, 4, 1 << 18, is_owned);
        assert_eq!((cut.chunks(), cut.largest_part()), (4096, 1 << 26));
        assert_eq!(cut.all_pieces(4095).last().map(|piece| piece.end), Some(1 << 40));
    }
}
