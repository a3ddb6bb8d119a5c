//! The trace event format of Chrome and Perfetto ("Trace Event Format", Google): complete events for what a rank does, nestable
//! asynchronous ones for messages in flight, flow events from a send to its receive.

use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::observe::{Event, Kind, Name};

/// One event; times in microseconds.
#[derive(Serialize)]
struct Entry<'a> {
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

/// Writes the events of all ranks: a process, and in it one row, for each rank of `program`.
pub(super) fn write(mut into: impl Write, program: &str, ranks: &[Vec<Event>]) -> io::Result<()> {
    let origin = ranks.iter().flatten().map(|event| event.start).min().unwrap_or_default();
    writeln!(into, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[", json!({"program": program}))?;
    for rank in 0..ranks.len() {
        let name = json!({"name": format!("rank {rank}")});
        let order = json!({"sort_index": rank});
        for (what, args) in [("process_name", &name), ("thread_name", &name), ("process_sort_index", &order)] {
            let entry = json!({"name": what, "ph": "M", "pid": rank, "tid": 0, "args": args});
            writeln!(into, "{entry},")?;
        }
    }
    let sends = ends_of_messages(ranks, Name::Send);
    let receives = ends_of_messages(ranks, Name::Receive);
    for (rank, events) in ranks.iter().enumerate() {
        for (number, event) in events.iter().enumerate() {
            let name = match event.kind() {
                Kind::Work if event.layer >= 0 => format!("{} {}", event.name().text(), event.layer),
                Kind::Work if event.micro_batch >= 0 => format!("{} {}", event.name().text(), event.micro_batch),
                _ => event.name().text().to_owned(),
            };
            let cat = match event.kind() {
                Kind::Work => "work",
                Kind::Communication => "communication",
                Kind::Flight => "in flight",
            };
            let at = |time: i64| (time - origin) as f64 / 1e3;
            let entry = |ph, time| Entry {
                name: &name,
                cat,
                ph,
                ts: at(time),
                dur: None,
                pid: rank,
                tid: 0,
                id: None,
                bp: None,
                args: Map::new(),
            };
            if event.kind() != Kind::Flight {
                let dur = Some(event.duration() as f64 / 1e3);
                line(&mut into, &Entry { dur, args: arguments(event), ..entry("X", event.start) })?;
                continue;
            }
            let id = Some(format!("{rank}.{number}"));
            line(&mut into, &Entry { id: id.clone(), args: arguments(event), ..entry("b", event.start) })?;
            line(&mut into, &Entry { id, ..entry("e", event.end) })?;
            // an arrow from the send to the end of the receive, where both are known and time goes forward
            let flow = |ph, time| Entry {
                name: "message",
                cat: "message",
                id: Some(format!("{:x}", event.link)),
                ..entry(ph, time)
            };
            if event.name() == Name::Send && receives.get(&event.link).is_some_and(|end| *end >= event.start) {
                line(&mut into, &flow("s", event.start))?;
            }
            if event.name() == Name::Receive && sends.get(&event.link).is_some_and(|start| *start <= event.end) {
                line(&mut into, &Entry { bp: Some("e"), ..flow("f", event.end) })?;
            }
        }
    }
    let last = json!({"name": "num_ranks", "ph": "M", "pid": 0, "tid": 0, "args": {"num_ranks": ranks.len()}});
    writeln!(into, "{last}\n]}}")?;
    into.flush()
}

fn line(into: &mut impl Write, entry: &Entry<'_>) -> io::Result<()> {
    serde_json::to_writer(&mut *into, entry)?;
    writeln!(into, ",")
}

/// When each message began to be sent, or was received.
fn ends_of_messages(ranks: &[Vec<Event>], name: Name) -> HashMap<i64, i64> {
    let messages = ranks.iter().flatten().filter(|event| event.kind() == Kind::Flight && event.name() == name);
    messages.map(|event| (event.link, if name == Name::Send { event.start } else { event.end })).collect()
}

fn arguments(event: &Event) -> Map<String, Value> {
    let numbers = [
        ("step", event.step),
        ("stage", event.stage),
        ("micro_batch", event.micro_batch),
        ("layer", event.layer),
        ("bytes", event.bytes),
    ];
    numbers.into_iter().filter(|(_, number)| *number >= 0).map(|(name, n)| (name.to_owned(), n.into())).collect()
}
