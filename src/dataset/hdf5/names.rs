//! The names in an HDF5 file, for messages.

use std::collections::{HashSet, VecDeque};

/// Returns the reason why the dataset `name` cannot be used: it is something else, cannot be
/// opened, or does not exist.
pub(super) fn missing(file: &hdf5::File, name: &str, error: &hdf5::Error) -> String {
    let exists = exists(file, name);
    if exists && file.group(name).is_err() {
        return format!("{name} exists, but cannot be opened: {error}");
    }
    let found = list(file);
    let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
    let what = if exists { format!("{name} is a group") } else { format!("it has no dataset {name}") };
    format!("{what}; its datasets: {found}")
}

/// Returns true if there is something called `name`.
pub(super) fn exists(file: &hdf5::File, name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').filter(|part| !part.is_empty()).collect();
    // a path exists as far as all its parts do
    !parts.is_empty() && (1..=parts.len()).all(|end| file.link_exists(&parts[..end].join("/")))
}

/// Lists the paths of the datasets of a file, twenty at most, those of outer groups first. Groups
/// may contain each other in a circle, so each is visited once.
fn list(file: &hdf5::File) -> Vec<String> {
    const MOST: usize = 20;
    const MOST_GROUPS: usize = 10_000;
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut pending: VecDeque<(hdf5::Group, String)> =
        file.as_group().map(|root| (root, String::new())).into_iter().collect();
    while let Some((group, prefix)) = pending.pop_front() {
        for name in group.member_names().unwrap_or_default() {
            let path = format!("{prefix}/{name}");
            if found.len() == MOST {
                return found;
            } else if group.dataset(&name).is_ok() {
                found.push(path);
            } else if seen.len() < MOST_GROUPS
                && let Ok(inner) = group.group(&name)
                && let Ok(place) = inner.loc_info()
                && seen.insert((place.fileno, format!("{:?}", place.token)))
            {
                pending.push_back((inner, path));
            }
        }
    }
    found
}
