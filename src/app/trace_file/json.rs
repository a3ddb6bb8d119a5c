//! The trace event format of Chrome and Perfetto ("Trace Event Format", Google): complete events
//! for the spans of a rank, nestable asynchronous ones for messages in flight, flow events from a
//! send to its receive.

use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::trace::{Event, EventKind, Name};

/// One event of the format; times in microseconds.
#[derive(Serialize)]
struct TraceEvent<'a> {
    name: &'a str,
    cat: &'a str,
    ph: &'a str,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: usize,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'a str>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    args: Map<String, Value>,
}

/// Writes the events of all ranks of `program`: a process for each rank, with a row
/// for its work and one for the thread that reads samples, if there is one.
pub(super) fn write(mut into: impl Write, program: &str, ranks: &[Vec<Event>]) -> io::Result<()> {
    let origin = ranks.iter().flatten().map(|event| event.start).min().unwrap_or_default();
    writeln!(
        into,
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[",
        json!({"program": program})
    )?;
    for (rank, events) in ranks.iter().enumerate() {
        let name = json!({"name": format!("rank {rank}")});
        let order = json!({"sort_index": rank});
        for (what, args) in [("process_name", &name), ("thread_name", &name), ("process_sort_index", &order)]
        {
            let entry = json!({"name": what, "ph": "M", "pid": rank, "tid": 0, "args": args});
            writeln!(into, "{entry},")?;
        }
        if events.iter().any(|event| event.kind() == EventKind::Loader) {
            let args = json!({"name": "loader"});
            let entry = json!({"name": "thread_name", "ph": "M", "pid": rank, "tid": 1, "args": args});
            writeln!(into, "{entry},")?;
        }
    }
    let sends = messages(ranks, Name::Send);
    let receives = messages(ranks, Name::Receive);
    for (rank, events) in ranks.iter().enumerate() {
        for (number, event) in events.iter().enumerate() {
            let name = match event.kind() {
                EventKind::Work if event.layer >= 0 => format!("{} {}", event.name().text(), event.layer),
                EventKind::Work if event.micro_batch >= 0 => {
                    format!("{} {}", event.name().text(), event.micro_batch)
                }
                _ => event.name().text().to_owned(),
            };
            let cat = match event.kind() {
                EventKind::Work => "work",
                EventKind::Communication => "communication",
                EventKind::Flight => "in flight",
                EventKind::Loader => "loader",
            };
            let at = |time: i64| (time - origin) as f64 / 1e3;
            let entry = |ph, time| TraceEvent {
                name: &name,
                cat,
                ph,
                ts: at(time),
                dur: None,
                pid: rank,
                tid: usize::from(event.kind() == EventKind::Loader),
                id: None,
                bp: None,
                args: Map::new(),
            };
            if event.kind() != EventKind::Flight {
                let dur = Some(event.duration() as f64 / 1e3);
                line(&mut into, &TraceEvent { dur, args: arguments(event), ..entry("X", event.start) })?;
                // an arrow from the start of a send to the end of the wait for its receive, bound
                // to the spans there
                let arrow = |ph, time| TraceEvent {
                    name: "message",
                    cat: "message",
                    id: Some(format!("{:x}", event.link)),
                    ..entry(ph, time)
                };
                let ends = sends.get(&event.link).zip(receives.get(&event.link));
                if let (EventKind::Communication, Some((start, end))) = (event.kind(), ends) {
                    if event.name() == Name::Send && event.start == *start {
                        line(&mut into, &arrow("s", *start))?;
                    } else if event.name() == Name::Receive && event.end == *end {
                        line(&mut into, &TraceEvent { bp: Some("e"), ..arrow("f", *end - 1) })?;
                    }
                }
                continue;
            }
            let id = Some(format!("{rank}.{number}"));
            line(
                &mut into,
                &TraceEvent { id: id.clone(), args: arguments(event), ..entry("b", event.start) },
            )?;
            line(&mut into, &TraceEvent { id, ..entry("e", event.end) })?;
        }
    }
    let last =
        json!({"name": "num_ranks", "ph": "M", "pid": 0, "tid": 0, "args": {"num_ranks": ranks.len()}});
    writeln!(into, "{last}\n]}}")?;
    into.flush()
}

fn line(into: &mut impl Write, entry: &TraceEvent<'_>) -> io::Result<()> {
    serde_json::to_writer(&mut *into, entry)?;
    writeln!(into, ",")
}

/// Returns, by the name that a message has on both ranks, the time at which it was sent, or at
/// which the wait for it ended.
fn messages(ranks: &[Vec<Event>], name: Name) -> HashMap<i64, i64> {
    let mut times = HashMap::new();
    let all = ranks.iter().flatten();
    for event in all
        .filter(|event| event.name() == name && event.kind() == EventKind::Communication && event.link != 0)
    {
        let time =
            times.entry(event.link).or_insert(if name == Name::Send { event.start } else { event.end });
        *time = if name == Name::Send { event.start.min(*time) } else { event.end.max(*time) };
    }
    times
}

fn arguments(event: &Event) -> Map<String, Value> {
    let numbers = [
        ("step", event.step),
        ("stage", event.stage),
        ("micro_batch", event.micro_batch),
        ("layer", event.layer),
        ("bytes", event.bytes),
        ("peer", event.peer),
    ];
    numbers
        .into_iter()
        .filter(|(_, number)| *number >= 0)
        .map(|(name, n)| (name.to_owned(), n.into()))
        .collect()
}
