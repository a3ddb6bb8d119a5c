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
pub(super) fn write(into: impl Write, program: &str, ranks: &[Vec<Event>]) -> io::Result<()> {
    let origin = ranks.iter().flatten().map(|event| event.start).min().unwrap_or_default();
    let (sends, receives) = (messages(ranks, Name::Send), messages(ranks, Name::Receive));
    let mut writer = TraceWriter { into, origin, sends, receives };
    let about = json!({"program": program});
    writeln!(writer.into, "{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":[")?;
    for (rank, events) in ranks.iter().enumerate() {
        writer.write_rows(rank, events)?;
    }
    for (rank, events) in ranks.iter().enumerate() {
        for (number, event) in events.iter().enumerate() {
            match event.kind() {
                EventKind::Flight => writer.write_flight(rank, number, event)?,
                _ => writer.write_span(rank, event)?,
            }
        }
    }
    let last =
        json!({"name": "num_ranks", "ph": "M", "pid": 0, "tid": 0, "args": {"num_ranks": ranks.len()}});
    writeln!(writer.into, "{last}\n]}}")?;
    writer.into.flush()
}

/// The file that is written, and what its entries refer to.
struct TraceWriter<W> {
    into: W,
    /// The start of the first event.
    origin: i64,
    /// The time at which each message was sent.
    sends: HashMap<i64, i64>,
    /// The time at which the wait for each message ended.
    receives: HashMap<i64, i64>,
}

impl<W: Write> TraceWriter<W> {
    /// Names the rows of a rank, and puts them in order.
    fn write_rows(&mut self, rank: usize, events: &[Event]) -> io::Result<()> {
        let name = json!({"name": format!("rank {rank}")});
        let order = json!({"sort_index": rank});
        let mut entries =
            vec![("process_name", 0, &name), ("thread_name", 0, &name), ("process_sort_index", 0, &order)];
        let loader = json!({"name": "loader"});
        if events.iter().any(|event| event.kind() == EventKind::Loader) {
            entries.push(("thread_name", 1, &loader));
        }
        for (what, row, args) in entries {
            let entry = json!({"name": what, "ph": "M", "pid": rank, "tid": row, "args": args});
            writeln!(self.into, "{entry},")?;
        }
        Ok(())
    }

    /// Writes what a thread did, and its end of an arrow from a send to its receive.
    fn write_span(&mut self, rank: usize, event: &Event) -> io::Result<()> {
        let name = span_name(event);
        let dur = Some(event.duration() as f64 / 1e3);
        let span =
            TraceEvent { dur, args: arguments(event), ..self.entry(&name, rank, event, "X", event.start) };
        self.write_line(&span)?;
        let ends = self.sends.get(&event.link).zip(self.receives.get(&event.link));
        let (EventKind::Communication, Some((start, end))) = (event.kind(), ends) else { return Ok(()) };
        // from the start of the send to the end of the wait for the receive, bound to the spans there
        let (ph, time, bp) = match event.name() {
            Name::Send if event.start == *start => ("s", *start, None),
            Name::Receive if event.end == *end => ("f", *end - 1, Some("e")),
            _ => return Ok(()),
        };
        let id = Some(format!("{:x}", event.link));
        let arrow = TraceEvent { cat: "message", id, bp, ..self.entry("message", rank, event, ph, time) };
        self.write_line(&arrow)
    }

    /// Writes the flight of a message, the `number`th event of its rank, which may overlap with others.
    fn write_flight(&mut self, rank: usize, number: usize, event: &Event) -> io::Result<()> {
        let (name, id) = (event.name().text(), Some(format!("{rank}.{number}")));
        let begin = self.entry(name, rank, event, "b", event.start);
        self.write_line(&TraceEvent { id: id.clone(), args: arguments(event), ..begin })?;
        self.write_line(&TraceEvent { id, ..self.entry(name, rank, event, "e", event.end) })
    }

    /// Returns an entry of phase `ph` about `event`, without what only some entries have.
    fn entry<'a>(&self, name: &'a str, rank: usize, event: &Event, ph: &'a str, time: i64) -> TraceEvent<'a> {
        let cat = match event.kind() {
            EventKind::Work => "work",
            EventKind::Communication => "communication",
            EventKind::Flight => "in flight",
            EventKind::Loader => "loader",
        };
        TraceEvent {
            name,
            cat,
            ph,
            ts: (time - self.origin) as f64 / 1e3,
            dur: None,
            pid: rank,
            tid: usize::from(event.kind() == EventKind::Loader),
            id: None,
            bp: None,
            args: Map::new(),
        }
    }

    fn write_line(&mut self, entry: &TraceEvent<'_>) -> io::Result<()> {
        serde_json::to_writer(&mut self.into, entry)?;
        writeln!(self.into, ",")
    }
}

/// Returns the name of a span: of work, with the number of its layer or micro-batch.
fn span_name(event: &Event) -> String {
    let text = event.name().text();
    match event.kind() {
        EventKind::Work if event.layer >= 0 => format!("{text} {}", event.layer),
        EventKind::Work if event.micro_batch >= 0 => format!("{text} {}", event.micro_batch),
        _ => text.to_owned(),
    }
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
