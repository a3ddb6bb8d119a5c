//! The rules of the house: which folder may use which, no circles between files, how long files and
//! lines may be, and one definition for each type name.

mod graph;
mod source;

use std::collections::{BTreeMap, BTreeSet};

use graph::Graph;
use source::{read, sources};

/// Each folder of `src`, and the folders that its files may use. A folder stands for everything in
/// it; one that contains the user stands for the files directly in it. An item counts where it is
/// defined: `memory` is also named for what `comm` re-exports from it.
const MAY_USE: &[(&str, &str)] = &[
    ("", ""),
    ("memory", ""),
    ("trace", ""),
    ("sums", ""),
    ("comm", "comm/algorithm comm/communicator comm/mpi memory sums trace"),
    ("comm/algorithm", "comm/mpi memory sums trace"),
    ("comm/communicator", "comm comm/algorithm comm/engine comm/mpi memory sums trace"),
    ("comm/engine", "comm comm/algorithm comm/mpi memory trace"),
    ("comm/mpi", "memory"),
    ("device", "memory sums"),
    ("device/cpu", "device device/cpu/matmul memory sums"),
    ("device/cpu/attention", "device device/cpu memory"),
    ("device/cpu/convolution", "device device/cpu device/cpu/convolution/winograd memory sums"),
    ("device/cpu/convolution/winograd", "device device/cpu device/cpu/convolution device/cpu/matmul"),
    ("device/cpu/matmul", "device/cpu memory sums"),
    ("device/cpu/norm", "device device/cpu sums"),
    ("device/cuda", "device device/cuda/runtime memory sums"),
    ("device/cuda/runtime", "device memory"),
    ("nn", "device nn/build nn/layer nn/text sums"),
    ("nn/build", "device nn nn/layer nn/text sums"),
    ("nn/layer", "device nn sums"),
    ("nn/text", "device nn"),
    ("optim", "device"),
    ("dataset", "dataset/hdf5 memory nn"),
    ("dataset/hdf5", "dataset memory nn trace"),
    ("store", "comm dataset nn trace"),
    ("parallel", "comm device nn parallel/schedule parallel/stage parallel/tensor parallel/watch sums trace"),
    (
        "parallel/audit",
        "comm device memory nn parallel parallel/data parallel/pipeline parallel/stage parallel/tensor \
         parallel/watch parallel/zero sums",
    ),
    ("parallel/watch", "device parallel/stage sums"),
    (
        "parallel/data",
        "comm device memory nn optim parallel parallel/schedule \
         parallel/stage parallel/watch parallel/zero sums trace",
    ),
    (
        "parallel/pipeline",
        "comm device memory nn parallel parallel/data parallel/schedule \
         parallel/stage parallel/tensor parallel/watch parallel/zero sums trace",
    ),
    ("parallel/schedule", ""),
    ("parallel/stage", "device nn parallel parallel/tensor sums trace"),
    ("parallel/tensor", "comm device memory nn parallel parallel/tensor/exchange sums"),
    ("parallel/tensor/exchange", "comm device memory parallel parallel/tensor sums"),
    ("parallel/zero", "comm device memory nn parallel parallel/watch"),
    ("checkpoint", "memory nn"),
    ("infer", "checkpoint comm dataset device nn parallel parallel/stage parallel/tensor sums"),
    ("app", "app/trace_file comm device trace"),
    ("app/trace_file", "comm trace"),
    ("measure", "comm device measure/operations memory"),
    ("measure/operations", "comm measure memory"),
    ("probe", "comm device measure memory"),
    (
        "train",
        "app checkpoint comm dataset device memory nn optim parallel \
         store sums trace train/checkpoints train/options train/samples train/trainer",
    ),
    ("train/samples", "checkpoint comm dataset memory nn store trace train/options"),
    (
        "train/checkpoints",
        "checkpoint comm device memory nn parallel trace train train/options train/trainer",
    ),
    ("train/options", "app checkpoint comm dataset device memory nn optim parallel"),
    ("train/trainer", "comm dataset device memory nn optim parallel train"),
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

#[test]
fn files_do_not_use_each_other_in_circles() {
    let graph = Graph::new(&sources(&["src"]));
    let found = graph.circles();
    let uses = found.iter().flat_map(|circle| graph.uses_within(circle));
    assert!(found.is_empty(), "circles:\n{}", Vec::from_iter(uses).join("\n"));
}

#[test]
fn a_type_name_is_defined_once() {
    let mut counts = BTreeMap::new();
    for source in sources(&["src"]).iter().filter(|source| source.path.ends_with(".rs")) {
        read(source).types.into_iter().for_each(|name| *counts.entry(name).or_insert(0) += 1);
    }
    counts.retain(|_, count| *count > 1);
    assert!(counts.is_empty(), "defined more than once: {counts:?}");
}

#[test]
fn one_place_names_each_outer_world() {
    for (name, place) in [("mpi", "src/comm/"), ("cudarc", "src/device/cuda/")] {
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

/// A sentence of documentation that begins with a question word, or with "The same", cannot be
/// understood by a reader who sees it alone.
#[test]
fn documentation_names_its_subject() {
    const WORDS: [&str; 7] = ["What ", "How ", "Where ", "Who ", "Whose ", "Which ", "The same "];
    let mut wrong = Vec::new();
    for source in sources(&["src", "apps"]) {
        let mut begins = true;
        for (line, text) in source.text.lines().enumerate() {
            let text = text.trim_start();
            let documentation = ["///", "//!"].iter().find_map(|mark| text.strip_prefix(mark));
            let Some(sentence) = documentation.map(str::trim) else {
                begins = true;
                continue;
            };
            if begins && WORDS.iter().any(|word| sentence.starts_with(word)) {
                wrong.push(format!("{}:{}: {sentence}", source.path, line + 1));
            }
            begins = sentence.is_empty();
        }
    }
    assert!(wrong.is_empty(), "{} sentences:\n{}", wrong.len(), wrong.join("\n"));
}
