//! The rules of the house: which folder may use which, no circles between files, how long files and
//! lines may be, and one definition for each type name.

mod graph;
mod source;

use std::collections::{BTreeMap, BTreeSet};

use graph::Graph;
use source::{read, sources};

/// Each folder of `src`, and the folders that its files may use. A folder stands for everything in
/// it; one that contains the user stands for the files directly in it.
const MAY_USE: &[(&str, &str)] = &[
    ("", ""),
    ("memory", ""),
    ("trace", ""),
    ("comm", "memory trace comm/algorithm comm/communicator comm/engine comm/mpi"),
    ("comm/algorithm", "trace"),
    ("comm/communicator", "comm comm/algorithm comm/engine comm/mpi memory trace"),
    ("comm/device", "comm comm/algorithm device memory trace"),
    ("comm/engine", "comm comm/algorithm comm/mpi memory trace"),
    ("comm/mpi", "comm memory trace"),
    ("device", "memory"),
    ("device/cpu", "device memory"),
    ("device/cuda", "device device/cuda/runtime memory"),
    ("device/cuda/runtime", "device memory"),
    ("nn", "device"),
    ("optim", "device"),
    ("dataset", "memory nn"),
    ("parallel", "comm device nn optim parallel/schedule parallel/stage parallel/tensor trace"),
    ("parallel/data", "comm device nn optim parallel trace"),
    (
        "parallel/pipeline",
        "comm device nn parallel parallel/data parallel/schedule parallel/stage parallel/tensor trace",
    ),
    ("parallel/schedule", ""),
    ("parallel/stage", "device nn parallel parallel/tensor trace"),
    ("parallel/tensor", "comm device nn"),
    ("checkpoint", "memory nn"),
    ("app", "app/trace_file comm device trace"),
    ("app/trace_file", "comm trace"),
    ("measure", "comm device measure/operations memory"),
    ("measure/operations", "comm device measure memory"),
    ("probe", "comm device measure"),
    ("train", "app checkpoint comm dataset device nn optim parallel probe trace train/options train/trainer"),
    ("train/options", "app comm dataset device nn optim parallel probe train"),
    ("train/trainer", "comm dataset device nn optim parallel trace train"),
];

/// Returns the folder of a file, from `src` on; empty for `src` itself.
fn folder_of(path: &str) -> &str {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    folder.trim_start_matches("src").trim_start_matches('/')
}

fn is_within(folder: &str, outer: &str) -> bool {
    outer.is_empty() || folder == outer || folder.starts_with(&format!("{outer}/"))
}

#[test]
fn folders_use_only_what_is_below_them() {
    let graph = Graph::new(&sources(&["src"]));
    let rows: BTreeMap<&str, &str> = MAY_USE.iter().copied().collect();
    let mut wrong = BTreeSet::new();
    for (file, arrows) in graph.files.iter().zip(&graph.arrows) {
        let folder = folder_of(file);
        let Some(row) = rows.get(folder) else {
            wrong.insert(format!("the folder src/{folder} has no row in MAY_USE"));
            continue;
        };
        for used in arrows.iter().map(|used| &graph.files[*used]) {
            let target = folder_of(used);
            let permits = |entry: &str| {
                if is_within(folder, entry) { target == entry } else { is_within(target, entry) }
            };
            // every folder may use the error type
            if target != folder && used != "src/error.rs" && !row.split_whitespace().any(permits) {
                wrong.insert(format!("{file} uses {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "not in MAY_USE:\n{}", Vec::from_iter(wrong).join("\n"));
}

/// Groups of files that use each other in circles. The list may only shrink.
const KNOWN_CIRCLES: &[&[&str]] = &[
    &["src/app/command_line.rs", "src/app/mod.rs", "src/app/watchdog.rs"],
    &["src/checkpoint/directory.rs", "src/checkpoint/read.rs", "src/checkpoint/seal.rs"],
    &[
        "src/comm/algorithm/doubling.rs",
        "src/comm/algorithm/mod.rs",
        "src/comm/algorithm/pairwise.rs",
        "src/comm/algorithm/ring.rs",
        "src/comm/algorithm/tree.rs",
    ],
    &["src/comm/blocking.rs", "src/comm/communicator.rs", "src/comm/raw.rs", "src/comm/world.rs"],
    &["src/comm/in_place.rs", "src/comm/pending.rs"],
    &["src/device/cpu/convolution_backward.rs", "src/device/cpu/matmul.rs", "src/device/cpu/mod.rs"],
    &[
        "src/device/cuda/kernels.rs",
        "src/device/cuda/memory.rs",
        "src/device/cuda/settled.rs",
        "src/device/cuda/shared.rs",
        "src/device/cuda/staged.rs",
    ],
    &["src/device/cuda/matmul.rs", "src/device/cuda/mod.rs", "src/device/cuda/readings.rs"],
    &["src/measure/contest.rs", "src/measure/mod.rs", "src/measure/overlap.rs", "src/measure/timing.rs"],
    &["src/nn/layer.rs", "src/nn/model.rs"],
    &["src/parallel/stage/arrays.rs", "src/parallel/stage/mod.rs"],
    &["src/trace/mod.rs", "src/trace/place.rs"],
    &["src/train/data_options.rs", "src/train/model_options.rs", "src/train/options.rs"],
];

#[test]
fn files_do_not_use_each_other_in_circles() {
    let graph = Graph::new(&sources(&["src"]));
    let found = graph.circles();
    let mut wrong: Vec<String> = Vec::new();
    for circle in found.iter().filter(|circle| !KNOWN_CIRCLES.contains(&circle.as_slice())) {
        wrong.push(format!("new: {circle:?}"));
        wrong.extend(graph.uses_within(circle));
    }
    let is_gone = |circle: &&&[&str]| !found.iter().any(|one| one == *circle);
    wrong.extend(KNOWN_CIRCLES.iter().filter(is_gone).map(|circle| format!("gone: {circle:?}")));
    assert!(wrong.is_empty(), "KNOWN_CIRCLES is out of date:\n{}", wrong.join("\n"));
}

/// Type names with more than one definition, and their number. The list may only shrink.
const KNOWN_HOMONYMS: &[(&str, usize)] = &[
    ("Action", 2),
    ("Description", 2),
    ("Entry", 5),
    ("Form", 2),
    ("Found", 2),
    ("Kind", 2),
    ("Lane", 2),
    ("Layout", 2),
    ("Memory", 2),
    ("Order", 2),
    ("Outcome", 2),
    ("Part", 3),
    ("Place", 3),
    ("Places", 2),
    ("Plan", 3),
    ("Progress", 2),
    ("Requests", 2),
    ("ScheduleKind", 2),
    ("Settings", 2),
    ("Settling", 2),
    ("Shared", 3),
    ("Slot", 2),
    ("Source", 2),
    ("Span", 2),
    ("Stage", 2),
    ("Started", 3),
    ("State", 2),
    ("Under", 2),
];

#[test]
fn a_type_name_is_defined_once() {
    let mut counts = BTreeMap::new();
    for source in sources(&["src"]).iter().filter(|source| source.path.ends_with(".rs")) {
        read(source).types.into_iter().for_each(|name| *counts.entry(name).or_insert(0) += 1);
    }
    let found: Vec<(&str, usize)> =
        counts.iter().map(|(name, count)| (name.as_str(), *count)).filter(|(_, count)| *count > 1).collect();
    assert_eq!(found, KNOWN_HOMONYMS);
}

#[test]
fn one_place_names_each_outer_world() {
    for (name, place) in
        [("mpi", "src/comm/"), ("cudarc", "src/device/cuda/"), ("gemm", "src/device/cpu/matmul.rs")]
    {
        let elsewhere = |path: &str| path.ends_with(".rs") && !path.starts_with(place);
        for source in sources(&["src", "apps"]).iter().filter(|source| elsewhere(&source.path)) {
            let contents = read(source);
            let mut paths = contents
                .imports
                .iter()
                .map(|import| &import.path)
                .chain(contents.paths.iter().map(|(_, path)| path));
            assert!(!paths.any(|path| path[0] == name), "{} names {name}", source.path);
        }
    }
}

const FOLDERS: [&str; 4] = ["src", "apps", "tests", "benches"];

#[test]
fn no_file_is_over_400_lines() {
    for source in sources(&FOLDERS) {
        let lines = source.text.lines().count();
        assert!(lines <= 400, "{} has {lines} lines", source.path);
    }
    let readme = include_str!("../../README.md").lines().count();
    assert!(readme <= 120, "README.md has {readme} lines");
}

#[test]
fn no_line_is_over_110_columns() {
    let mut wide = Vec::new();
    for source in sources(&FOLDERS) {
        for (line, text) in source.text.lines().enumerate() {
            let columns = text.chars().count();
            if columns > 110 {
                wide.push(format!("{}:{} has {columns} columns", source.path, line + 1));
            }
        }
    }
    assert!(wide.is_empty(), "{} lines:\n{}", wide.len(), wide.join("\n"));
}
