//! The division of the ranks' time in steps.

use std::collections::HashMap;

use crate::trace::{Event, EventKind, Name};

/// Nanoseconds of one rank's steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct StepTimes {
    steps: i64,
    /// Inside MPI, after all other ranks had arrived.
    communication: i64,
    /// Inside MPI, before the last rank arrived.
    idle: i64,
}

/// The division of all ranks' time in steps, as fractions of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Outside MPI.
    pub compute: f64,
    /// Inside MPI, after all other ranks had arrived.
    pub communication: f64,
    /// Inside MPI, before the last rank arrived.
    pub idle: f64,
    /// The fraction of the time from the first to the last pass of a step in which ranks run no
    /// pass.
    pub bubble: f64,
    /// The value of `bubble` that the schedule implies, if it is one of a pipeline.
    pub expected_bubble: Option<f64>,
}

impl Summary {
    /// Summarises the events of all ranks; `None` if there was no step.
    pub(super) fn new(ranks: &[Vec<Event>], expected_bubble: Option<f64>) -> Option<Summary> {
        let arrivals = last_arrivals(ranks);
        let times: Vec<StepTimes> = ranks.iter().map(|events| step_times(events, &arrivals)).collect();
        let sum = |of: fn(&StepTimes) -> i64| times.iter().map(of).sum::<i64>() as f64;
        let steps = sum(|rank| rank.steps);
        let (communication, idle) = (sum(|rank| rank.communication) / steps, sum(|rank| rank.idle) / steps);
        let compute = 1.0 - communication - idle;
        (steps > 0.0).then(|| Summary {
            compute,
            communication,
            idle,
            bubble: bubble(ranks),
            expected_bubble,
        })
    }

    /// Formats the summary as lines for the log.
    pub(super) fn lines(&self) -> Vec<String> {
        let percent = |fraction: f64| format!("{:.1} %", 100.0 * fraction);
        let mut lines = vec![format!(
            "time in steps, all ranks: compute {}, exposed communication {}, idle {}",
            percent(self.compute),
            percent(self.communication),
            percent(self.idle)
        )];
        lines.extend(self.expected_bubble.map(|expected| {
            let theory = "if stages take equal times, backward passes twice as long as forward ones, \
                          and messages none";
            format!("bubble: {} measured, {} {theory}", percent(self.bubble), percent(expected))
        }));
        lines
    }
}

/// Returns, for each message and collective operation, when the last of its ranks arrived.
fn last_arrivals(ranks: &[Vec<Event>]) -> HashMap<i64, i64> {
    let mut arrivals: HashMap<i64, i64> = HashMap::new();
    for events in ranks {
        let mut first: HashMap<i64, i64> = HashMap::new();
        for event in events.iter().filter(|event| event.link != 0) {
            let start = first.entry(event.link).or_insert(event.start);
            *start = event.start.min(*start);
        }
        for (link, start) in first {
            let last = arrivals.entry(link).or_insert(start);
            *last = start.max(*last);
        }
    }
    arrivals
}

fn step_times(events: &[Event], arrivals: &HashMap<i64, i64>) -> StepTimes {
    let steps = steps(events);
    let mut times =
        StepTimes { steps: steps.iter().map(|step| step.duration()).sum(), ..StepTimes::default() };
    for event in events.iter().filter(|event| event.kind() == EventKind::Communication) {
        if span_around(&steps, event).is_some() {
            let last = arrivals.get(&event.link).copied().unwrap_or(event.start);
            let idle = last.clamp(event.start, event.end) - event.start;
            times.idle += idle;
            times.communication += event.duration() - idle;
        }
    }
    times
}

/// Returns the fraction of all ranks' time between the first and the last pass of each step in
/// which they run no pass.
fn bubble(ranks: &[Vec<Event>]) -> f64 {
    // for each step: begin, end, busy time of all ranks in between, and the number of ranks that
    // took it
    let mut spans: HashMap<i64, (i64, i64, i64, usize)> = HashMap::new();
    for events in ranks {
        let steps = steps(events);
        for step in &steps {
            spans.entry(step.step).or_insert((i64::MAX, i64::MIN, 0, 0)).3 += 1;
        }
        let is_work = |event: &&Event| event.kind() == EventKind::Work;
        let passes: Vec<Event> =
            events.iter().filter(is_work).filter(|event| event.name().is_pass()).copied().collect();
        // updates start as soon as gradients are complete, inside the last passes, and are not part
        // of them
        for update in events.iter().filter(is_work).filter(|event| event.name() == Name::Optimizer) {
            if let (Some(_), Some(step)) = (span_around(&passes, update), span_around(&steps, update)) {
                spans.entry(step.step).or_insert((i64::MAX, i64::MIN, 0, 0)).2 -= update.duration();
            }
        }
        for event in &passes {
            if let Some(step) = span_around(&steps, event) {
                let (start, end, busy, _) = spans.entry(step.step).or_insert((i64::MAX, i64::MIN, 0, 0));
                (*start, *end) = (event.start.min(*start), event.end.max(*end));
                *busy += event.duration();
            }
        }
    }
    // steps that some rank could no longer record do not count
    spans.retain(|_, (start, end, _, num_ranks)| *num_ranks == ranks.len() && start < end);
    let whole: i64 = spans.values().map(|(start, end, ..)| (end - start) * ranks.len() as i64).sum();
    let busy: i64 = spans.values().map(|(_, _, busy, _)| busy).sum();
    if whole > 0 { 1.0 - busy as f64 / whole as f64 } else { 0.0 }
}

/// Returns a rank's steps, in order.
fn steps(events: &[Event]) -> Vec<Event> {
    events
        .iter()
        .filter(|event| event.name() == Name::Step && event.kind() == EventKind::Work)
        .copied()
        .collect()
}

/// Returns the one of `spans`, which follow each other, that contains `event`.
fn span_around<'a>(spans: &'a [Event], event: &Event) -> Option<&'a Event> {
    let after = spans.partition_point(|span| span.start <= event.start);
    spans[..after].last().filter(|span| event.end <= span.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace;

    /// Records the events of `work` and gives them `times`, in the order of the spans' ends.
    fn events(times: &[(i64, i64)], work: impl FnOnce()) -> Vec<Event> {
        trace::start(1);
        work();
        let mut events = trace::finish().events;
        assert_eq!(events.len(), times.len());
        for (event, (start, end)) in events.iter_mut().zip(times) {
            (event.start, event.end) = (*start, *end);
        }
        events
    }

    fn pass(name: Name) {
        drop(trace::work(name).micro_batch(0, 0));
    }

    #[test]
    fn waiting_for_one_who_comes_late_is_idle_and_the_rest_is_communication() {
        let step = || trace::work(Name::Step).step(1);
        let first = events(&[(0, 40), (40, 90), (0, 100)], || {
            let _step = step();
            pass(Name::Forward);
            drop(trace::communication(Name::AllReduce, 8, 77, None));
        });
        let second = events(&[(0, 80), (80, 95), (0, 100)], || {
            let _step = step();
            pass(Name::Backward);
            drop(trace::communication(Name::AllReduce, 8, 77, None));
        });
        let summary = Summary::new(&[first, second], Some(0.25)).unwrap();
        assert_eq!((summary.idle, summary.communication), (40.0 / 200.0, 25.0 / 200.0));
        assert_eq!(summary.bubble, 1.0 - 120.0 / 160.0);
        assert!(summary.lines()[1].contains("25.0 % measured, 25.0 % if"), "{:?}", summary.lines());
        assert_eq!(Summary::new(&[Vec::new()], None), None);
    }
}
