//! How the ranks' time in steps was spent.

use std::collections::HashMap;

use crate::observe::{Event, Kind, Name};

/// Nanoseconds of one rank's steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Shares {
    steps: i64,
    /// Inside MPI, after all others had come.
    communication: i64,
    /// Inside MPI, before that.
    idle: i64,
}

/// What there is to say: nothing if no step was taken.
pub(super) fn lines(ranks: &[Vec<Event>], expected_bubble: Option<f64>) -> Vec<String> {
    let came = last_to_come(ranks);
    let shares: Vec<Shares> = ranks.iter().map(|events| shares(events, &came)).collect();
    let sum = |of: fn(&Shares) -> i64| shares.iter().map(of).sum::<i64>() as f64;
    let steps = sum(|rank| rank.steps);
    if steps == 0.0 {
        return Vec::new();
    }
    let percent = |time: f64| format!("{:.1} %", 100.0 * time / steps);
    let (communication, idle) = (sum(|rank| rank.communication), sum(|rank| rank.idle));
    let mut lines = vec![format!(
        "time in steps, all ranks: compute {}, exposed communication {}, idle {}",
        percent(steps - communication - idle),
        percent(communication),
        percent(idle)
    )];
    if let Some(expected) = expected_bubble {
        let theory = "if a backward pass takes twice a forward pass and messages nothing";
        let (measured, expected) = (100.0 * bubble(ranks), 100.0 * expected);
        lines.push(format!("bubble: {measured:.1} % measured, {expected:.1} % {theory}"));
    }
    lines
}

/// For each message and collective operation, when the last of its ranks came to it.
fn last_to_come(ranks: &[Vec<Event>]) -> HashMap<i64, i64> {
    let mut came: HashMap<i64, i64> = HashMap::new();
    for events in ranks {
        let mut first: HashMap<i64, i64> = HashMap::new();
        for event in events.iter().filter(|event| event.link != 0) {
            let start = first.entry(event.link).or_insert(event.start);
            *start = event.start.min(*start);
        }
        for (link, start) in first {
            let last = came.entry(link).or_insert(start);
            *last = start.max(*last);
        }
    }
    came
}

fn shares(events: &[Event], came: &HashMap<i64, i64>) -> Shares {
    let steps = steps(events);
    let mut shares = Shares { steps: steps.iter().map(|step| step.duration()).sum(), ..Shares::default() };
    for event in events.iter().filter(|event| event.kind() == Kind::Communication) {
        if step_of(&steps, event).is_some() {
            let last = came.get(&event.link).copied().unwrap_or(event.start);
            let idle = last.clamp(event.start, event.end) - event.start;
            shares.idle += idle;
            shares.communication += event.duration() - idle;
        }
    }
    shares
}

/// The share of all ranks' time between the first and the last pass of each step in which they do no pass.
fn bubble(ranks: &[Vec<Event>]) -> f64 {
    // for each step: begin, end, and what all ranks did in between
    let mut spans: HashMap<i64, (i64, i64, i64)> = HashMap::new();
    for events in ranks {
        let steps = steps(events);
        for event in events.iter().filter(|event| event.name().is_pass() && event.kind() == Kind::Work) {
            if let Some(step) = step_of(&steps, event) {
                let (start, end, busy) = spans.entry(step.step).or_insert((i64::MAX, i64::MIN, 0));
                (*start, *end) = (event.start.min(*start), event.end.max(*end));
                *busy += event.duration();
            }
        }
    }
    let whole: i64 = spans.values().map(|(start, end, _)| (end - start) * ranks.len() as i64).sum();
    let busy: i64 = spans.values().map(|(.., busy)| busy).sum();
    if whole > 0 { 1.0 - busy as f64 / whole as f64 } else { 0.0 }
}

/// A rank's steps, in order.
fn steps(events: &[Event]) -> Vec<Event> {
    events.iter().filter(|event| event.name() == Name::Step && event.kind() == Kind::Work).copied().collect()
}

/// The step that `event` lies in.
fn step_of<'a>(steps: &'a [Event], event: &Event) -> Option<&'a Event> {
    let after = steps.partition_point(|step| step.start <= event.start);
    steps[..after].last().filter(|step| event.end <= step.end)
}
