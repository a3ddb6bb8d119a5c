//! Tests of all generated schedules, of schedules broken by hand, and of thousands broken at
//! random.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::time::Duration;

use clap::ValueEnum;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

use super::*;

fn generate(kind: PipelineScheduleKind, ranks: usize, micro_batches: usize) -> Schedule {
    let stages_per_rank = if kind == PipelineScheduleKind::Interleaved { 2 } else { 1 };
    kind.generate(ranks, stages_per_rank, micro_batches).unwrap()
}

#[test]
fn all_kinds_are_sound_for_one_to_eight_ranks_and_one_to_sixteen_micro_batches() {
    for ranks in 1..=8 {
        for micro_batches in 1..=16 {
            for &kind in PipelineScheduleKind::value_variants() {
                let check = |schedule: Schedule| {
                    let name = format!("{kind:?} {ranks} {micro_batches}");
                    let report = schedule.check().unwrap_or_else(|error| panic!("{name}: {error}"));
                    assert_eq!(schedule.num_micro_batches, micro_batches, "{name}");
                    let again = Schedule::from_csv(&schedule.to_csv(), "a test").unwrap();
                    assert_eq!(again, schedule, "{name}");
                    report
                };
                let report = check(generate(kind, ranks, micro_batches));
                let limit = match kind {
                    PipelineScheduleKind::Sequential => 1,
                    PipelineScheduleKind::GPipe | PipelineScheduleKind::Deferred => micro_batches,
                    PipelineScheduleKind::OneForwardOneBackward | PipelineScheduleKind::ZeroBubble => ranks,
                    PipelineScheduleKind::Interleaved if micro_batches % ranks == 0 => {
                        2 * (ranks - 1) + ranks + 1
                    }
                    // no bound is promised
                    PipelineScheduleKind::Interleaved => usize::MAX,
                };
                if kind == PipelineScheduleKind::OneForwardOneBackward {
                    let expected: Vec<usize> =
                        (0..ranks).map(|rank| micro_batches.min(ranks - rank)).collect();
                    assert_eq!(report.peak_live, expected);
                }
                if kind == PipelineScheduleKind::ZeroBubble {
                    assert_eq!(report.peak_live, vec![micro_batches.min(ranks); ranks]);
                }
                let most = *report.peak_live.iter().max().unwrap();
                assert!(most <= limit, "{kind:?} {ranks} {micro_batches}: {most} live");
                if kind == PipelineScheduleKind::Interleaved {
                    (3..=4)
                        .for_each(|stages| drop(check(kind.generate(ranks, stages, micro_batches).unwrap())));
                }
            }
        }
    }
}

#[test]
fn bubbles_are_those_of_the_papers() {
    for (p, m) in [(1, 4), (2, 2), (2, 8), (3, 7), (4, 4), (4, 8), (8, 16)] {
        let bubble = |kind| generate(kind, p, m).check().unwrap().bubble;
        let close = |found: f64, expected: f64| {
            assert!((found - expected).abs() < 1e-12, "{p} {m}: {found} {expected}")
        };
        let (ranks, micro_batches) = (p as f64, m as f64);
        let classic = (ranks - 1.0) / (micro_batches + ranks - 1.0);
        close(bubble(PipelineScheduleKind::Sequential), (ranks - 1.0) / ranks);
        close(bubble(PipelineScheduleKind::GPipe), classic);
        close(bubble(PipelineScheduleKind::OneForwardOneBackward), classic);
        if m % p == 0 {
            close(
                bubble(PipelineScheduleKind::Interleaved),
                (ranks - 1.0)
                    / (2.0 * micro_batches * f64::from(p > 1) + micro_batches * f64::from(p == 1) + ranks
                        - 1.0),
            );
        }
        if m >= p {
            // (p − 1)(F + I − W) of idle time, a third of 1F1B's
            close(
                bubble(PipelineScheduleKind::ZeroBubble),
                (ranks - 1.0) / (3.0 * micro_batches + ranks - 1.0),
            );
        }
    }
}

#[test]
fn one_forward_one_backward_looks_as_in_the_paper() {
    let schedule = generate(PipelineScheduleKind::OneForwardOneBackward, 2, 3);
    let csv = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2\n\
               1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1RECV_F2,1F1,1B1,1SEND_B1,1F2,1B2,1SEND_B2\n";
    let without: Vec<Vec<String>> = [schedule.to_csv().as_str(), csv]
        .iter()
        .map(|text| text.split([',', '\n']).filter(|cell| !cell.contains('_')).map(str::to_owned).collect())
        .collect();
    assert_eq!(without[0], without[1]);
    Schedule::from_csv(csv, "a test").unwrap().check().unwrap();
    assert_eq!(schedule.stages_of(1), [1]);
    let table = schedule.table("1f1b", &schedule.check().unwrap()).unwrap();
    assert!(table.contains("rank 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2\n"), "{table}");
    assert!(
        table.contains("3 micro-batches; bubble 25.0 %, at most 2 live micro-batches on a rank"),
        "{table}"
    );
}

#[test]
fn broken_schedules_are_refused_by_the_name_of_the_action() {
    let sound = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n\
                 1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
    Schedule::from_csv(sound, "a test").unwrap().check().unwrap();
    for (from, into, expected) in [
        ("1RECV_F1,", "", "0SEND_F1 on rank 0 has no 1RECV_F1"),
        ("0SEND_F1,", "", "1RECV_F1 on rank 1 has no 0SEND_F1"),
        (
            "0SEND_F1,0RECV_B0,",
            "0RECV_B0,0SEND_F1,",
            "rank 0 waits at 0RECV_B0 for 1SEND_B0, rank 1 waits at 1RECV_F1 for 0SEND_F1",
        ),
        ("1F0,1RECV_F1,1F1,1B0", "1B0,1RECV_F1,1F1,1F0", "1B0 comes before 1F0 on rank 1"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "1F0 comes before 1RECV_F0 on rank 1"),
        ("0RECV_B0,0B0", "0B0,0RECV_B0", "0B0 comes before 0RECV_B0 on rank 0"),
        ("0F1,0SEND_F1", "0SEND_F1,0F1", "0SEND_F1 comes before 0F1 on rank 0"),
        ("1B1,1SEND_B1", "1SEND_B1,1B1", "1SEND_B1 comes before 1B1 on rank 1"),
        ("0B1", "0B0", "0B0 is done twice, on rank 0 and on rank 0"),
        ("1B0,", "1W0,", "1I0 is missing"),
        ("1B0,", "1I0,", "1W0 is missing"),
        ("1B0,", "1I0,1B0,1W0,", "1I0 is in 1B0 already"),
        ("1B0,", "1W0,1I0,", "1W0 comes before 1I0 on rank 1"),
        ("0B1", "1B1", "1B1 is done twice"),
        ("0F1,0SEND_F1", "0SEND_F1", "0F1 is missing"),
        ("0B1", "0B1,1F2", "1F2 on rank 0 is outside of 2 stages and 2 micro-batches"),
        ("0B1", "0B1,0SEND_B1", "0SEND_B1 on rank 0 has no stage at its other end"),
        ("0B1", "0B1,1SEND_F1", "1SEND_F1 on rank 0 has no stage at its other end"),
    ] {
        assert!(sound.contains(from), "{from}");
        let schedule = Schedule {
            num_stages: 2,
            num_micro_batches: 2,
            ..Schedule::from_csv(&sound.replacen(from, into, 1), "a test").unwrap()
        };
        let found = schedule.check().unwrap_err().to_string();
        assert!(found.contains(expected), "{into}: {found} is not {expected}");
    }
    let error = Schedule::from_csv("0F0,0X1\n", "plan.csv").unwrap_err().to_string();
    assert!(
        error.contains("plan.csv") && error.contains("line 1, column 2: \"0X1\" is not an action"),
        "{error}"
    );
    let error =
        Schedule::from_csv("0F0,0SEND_F0\n\n,1RECV_F0, 1F0,1Q7\n", "plan.csv").unwrap_err().to_string();
    assert!(error.contains("plan.csv: line 3, column 4: \"1Q7\" is not an action"), "{error}");
    let error = Schedule::from_csv("0F0,1048576F0\n", "plan.csv").unwrap_err().to_string();
    assert!(error.contains("\"1048576F0\" must be below 1048576"), "{error}");
    let error = Schedule::from_csv("0B0,0F0\n", "plan.csv").unwrap_err().to_string();
    assert!(error.contains("reading the schedule plan.csv") && error.contains("rank 0 at 0B0"), "{error}");
    // each rank waits for the other
    let error = Schedule::from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "plan.csv").unwrap_err().to_string();
    assert!(error.contains("rank 0 at 0B0, rank 1 at 1F1"), "{error}");
}

#[test]
fn stages_that_follow_on_one_rank_need_no_message() {
    // the V of zero-bubble schedules: rank 0 has the first and the last stage
    let schedule = Schedule::from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", "a test").unwrap();
    assert_eq!(schedule.stages_of(0), [0, 3]);
    assert!(!schedule.to_csv().contains("1SEND_F0") && schedule.to_csv().contains("2SEND_F0"));
    schedule.check().unwrap();
}

#[test]
fn what_is_left_for_an_evaluation_is_forward() {
    let schedule = generate(PipelineScheduleKind::Interleaved, 3, 4);
    let forward = schedule.forward_only();
    assert!(forward.ranks.iter().all(|actions| !actions.is_empty()));
    let names = forward.to_csv();
    assert!(!names.contains(['B', 'I', 'W']), "{names}");
    assert_eq!(names.matches("SEND_F").count(), 4 * 5);
}

#[test]
fn no_schedule_that_is_accepted_hangs_under_rendezvous_sends() {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut below = |most: usize| random.next_u32() as usize % most.max(1);
    let (mut sound, mut changed, mut refused) = (0, 0, 0);
    let kinds = PipelineScheduleKind::value_variants();
    for _ in 0..10_000 {
        let kind = kinds[below(kinds.len())];
        let original = generate(kind, 1 + below(4), 1 + below(5));
        let mut schedule = original.clone();
        for _ in 0..below(4) {
            mutate(&mut schedule, &mut below);
        }
        match schedule.check() {
            Ok(_) => {
                *if schedule == original { &mut sound } else { &mut changed } += 1;
                execute(schedule);
            }
            Err(_) => {
                refused += 1;
                assert_ne!(schedule, original);
            }
        }
    }
    assert!(
        sound > 1000 && changed > 400 && refused > 1500,
        "{sound} sound, {changed} changed, {refused} refused"
    );
}

fn mutate(schedule: &mut Schedule, below: &mut impl FnMut(usize) -> usize) {
    let rank = below(schedule.ranks.len());
    let len = schedule.ranks[rank].len();
    let (first, second) = (below(len), below(len));
    match below(8) {
        0 => drop(schedule.ranks[rank].remove(first)),
        1 => {
            let action = schedule.ranks[rank].remove(first);
            let other = below(schedule.ranks.len());
            let place = below(schedule.ranks[other].len() + 1);
            schedule.ranks[other].insert(place, action);
        }
        2 => schedule.ranks[rank].swap(first, second),
        3 => {
            let action = schedule.ranks[rank][first];
            schedule.ranks[rank].insert(second, action);
        }
        // those that may well leave it sound
        4 | 5 if first + 1 < len => schedule.ranks[rank].swap(first, first + 1),
        _ => {
            let action = schedule.ranks[rank].remove(first);
            schedule.ranks[rank].insert(first.saturating_sub(below(3)), action);
        }
    }
    if schedule.ranks.iter().any(Vec::is_empty) {
        *schedule = generate(PipelineScheduleKind::GPipe, 2, 2);
    }
}

/// Runs a schedule with a thread for each rank and sends that wait for their receives; fails if
/// that takes seconds, or if a pass begins without what it needs.
fn execute(schedule: Schedule) {
    let text = schedule.to_csv();
    let mut senders: HashMap<Action, SyncSender<()>> = HashMap::new();
    let mut receivers: HashMap<Action, Receiver<()>> = HashMap::new();
    for action in schedule.ranks.iter().flatten() {
        if matches!(action.work, Work::SendActivation | Work::SendGradient) {
            let (sender, receiver) = sync_channel(0);
            senders.insert(*action, sender);
            receivers.insert(action.partner().unwrap(), receiver);
        }
    }
    let (finished, all_finished) = channel();
    let owners = schedule.owners();
    for (rank, actions) in schedule.ranks.iter().cloned().enumerate() {
        let mine = |action: &Action| owners[action.stage] == Some(rank);
        let senders: HashMap<_, _> = senders.extract_if(|action, _| mine(action)).collect();
        let receivers: HashMap<_, _> = receivers.extract_if(|action, _| mine(action)).collect();
        let (finished, text, last) = (finished.clone(), text.clone(), schedule.num_stages - 1);
        std::thread::spawn(move || {
            let mut done = HashSet::new();
            for action in actions {
                let Action { stage, work, micro_batch } = action;
                let has = |stage, work| done.contains(&Action::new(stage, work, micro_batch));
                let fine = match work {
                    Work::SendActivation | Work::SendGradient => senders[&action].send(()).is_ok(),
                    Work::ReceiveActivation | Work::ReceiveGradient => receivers[&action].recv().is_ok(),
                    Work::Forward => {
                        stage == 0 || has(stage, Work::ReceiveActivation) || has(stage - 1, Work::Forward)
                    }
                    Work::WeightGradient => has(stage, Work::InputGradient),
                    Work::Backward | Work::InputGradient => {
                        let next = [Work::Backward, Work::InputGradient]
                            .into_iter()
                            .any(|work| has(stage + 1, work));
                        has(stage, Work::Forward)
                            && (stage == last || has(stage, Work::ReceiveGradient) || next)
                    }
                };
                if !fine {
                    let _ = finished.send(Err(format!("{action} on rank {rank} lacks something in\n{text}")));
                    return;
                }
                done.insert(action);
            }
            let _ = finished.send(Ok(()));
        });
    }
    for _ in 0..schedule.ranks.len() {
        match all_finished.recv_timeout(Duration::from_secs(20)) {
            Ok(outcome) => outcome.unwrap(),
            Err(_) => panic!("it hangs:\n{text}"),
        }
    }
}

#[test]
fn what_no_memory_can_hold_is_refused_with_the_numbers() {
    let huge = usize::MAX;
    for (ranks, stages, micro_batches) in
        [(huge, 1, 8), (100_000, 1, 200_000), (2, huge, 8), (2, 1, 100_000_000)]
    {
        let error = PipelineScheduleKind::Interleaved.generate(ranks, stages, micro_batches).unwrap_err();
        assert!(error.to_string().contains("262144 is the limit") && error.exit_code() == 2, "{error}");
    }
    let long = generate(PipelineScheduleKind::Sequential, 100, 20);
    let error = long.table("sequential", &long.check().unwrap()).unwrap_err().to_string();
    assert!(error.contains("cells, and 100000 is the limit"), "{error}");
}
