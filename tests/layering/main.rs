//! Who may use whom, read off the `use` lines, and how long a file may be.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    fn walk(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path
                .extension()
                .is_some_and(|extension| ["rs", "cu", "cuh"].iter().any(|e| extension == *e))
            {
                found.push((path.clone(), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut found = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found);
    assert!(!found.is_empty(), "{folder} has no sources");
    found
}

/// The code of a file, without comments.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

#[test]
fn modules_use_only_what_is_below_them() {
    let allowed: &[(&str, &[&str])] = &[
        ("memory", &[]),
        ("trace", &[]),
        ("comm", &["memory", "trace"]),
        ("device", &["memory"]),
        ("nn", &["device"]),
        ("optim", &["device"]),
        ("dataset", &["memory", "nn"]),
        ("parallel", &["comm", "device", "nn", "trace", "optim"]),
        ("checkpoint", &["memory", "nn"]),
        ("app", &["comm", "device", "trace"]),
        ("measure", &["comm", "device", "memory"]),
        ("probe", &["comm", "device", "measure"]),
        ("train", &["app", "checkpoint", "comm", "dataset", "device", "nn", "trace", "optim", "parallel"]),
    ];
    let all = sources("src");
    for (module, below) in allowed {
        let inside = [format!("/src/{module}/"), format!("/src/{module}.rs")];
        let files =
            all.iter().filter(|(path, _)| inside.iter().any(|part| path.to_string_lossy().contains(part)));
        let files: Vec<_> = files.collect();
        assert!(!files.is_empty(), "there is no module {module}");
        for (path, text) in files {
            let code = code(text);
            // ways around the plain `crate::module` that is looked for
            for hidden in ["super::super", "use crate::{", "use crate as", "use crate::*"] {
                let allowed = hidden == "use crate::{"
                    && code.matches(hidden).count() == code.matches("use crate::{Error, Result}").count();
                assert!(
                    allowed || !code.contains(hidden),
                    "{} hides what it uses behind {hidden}",
                    path.display()
                );
            }
            // where the two meet, and nowhere else
            let meets = ["mod", "mirror", "settlement"]
                .iter()
                .any(|name| path.ends_with(format!("src/comm/device/{name}.rs")));
            let is_below = |other: &str| below.contains(&other) || meets && other == "device";
            for (other, _) in allowed.iter().filter(|(other, _)| other != module && !is_below(other)) {
                assert!(!code.contains(&format!("crate::{other}")), "{} uses crate::{other}", path.display());
            }
        }
    }
    let modules = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    for module in modules.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')) {
        assert!(allowed.iter().any(|(name, _)| *name == module), "{module} is not in the table");
    }
}

#[test]
fn one_place_names_each_outer_world() {
    for (name, place) in
        [("mpi::", "src/comm/"), ("cudarc::", "src/device/cuda/"), ("gemm::", "src/device/cpu/matmul.rs")]
    {
        for (path, text) in sources("src").into_iter().chain(sources("apps")) {
            let inside = path.to_string_lossy().contains(place);
            let names = code(&text)
                .split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
                .any(|word| word.starts_with(name));
            assert!(inside || !names, "{} names {name}", path.display());
        }
    }
}

#[test]
fn no_file_is_over_400_lines() {
    for folder in ["src", "apps", "tests", "benches"] {
        for (path, text) in sources(folder) {
            assert!(text.lines().count() <= 400, "{} has {} lines", path.display(), text.lines().count());
        }
    }
}
