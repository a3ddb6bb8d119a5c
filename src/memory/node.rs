//! The memory of this node, or of this job's part of it: all of it, and what is free.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the total memory of this machine, with its swap space, in bytes, if the system reports
/// it.
pub fn total_bytes() -> Option<usize> {
    static TOTAL: OnceLock<Option<usize>> = OnceLock::new();
    *TOTAL.get_or_init(|| {
        let text = fs::read_to_string("/proc/meminfo").ok()?;
        Some(kibibytes(&text, "MemTotal:")?.saturating_add(kibibytes(&text, "SwapTotal:").unwrap_or(0)))
    })
}

/// Returns the memory of this node, or of this job's part of it, in bytes, if the system reports it.
pub fn limit_bytes() -> Option<usize> {
    let groups = control_groups().into_iter().filter_map(|group| group.limit());
    groups.chain(total_bytes()).min()
}

/// Returns the memory that processes of this job may still take on this node, in bytes, if the
/// system reports it. Cached files count as free.
pub fn free_bytes() -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let groups = control_groups().into_iter().filter_map(|group| group.free());
    groups.chain(kibibytes(&text, "MemAvailable:")).min()
}

/// Returns a number of bytes in megabytes, for messages.
pub fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

/// Refuses a size above the memory of this node, or of this job's part of it. Linux would grant it, and later
/// kill the process that uses it.
///
/// # Errors
/// `bytes` is above that memory; the message has both sizes.
pub fn check_room(bytes: usize) -> Result<(), String> {
    static LIMIT: OnceLock<Option<usize>> = OnceLock::new();
    match *LIMIT.get_or_init(limit_bytes) {
        Some(limit) if bytes > limit => {
            let gibibytes = |bytes: usize| bytes as f64 / f64::from(1 << 30);
            let (wanted, limit) = (gibibytes(bytes), gibibytes(limit));
            Err(format!("that is {wanted:.1} GiB, and the job may have {limit:.1} on this node"))
        }
        _ => Ok(()),
    }
}

/// Returns the bytes of a line such as `MemTotal:  16384 kB`.
pub fn kibibytes(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<usize>().ok()?.saturating_mul(1024))
}

/// A control group with a memory controller (Linux's cgroup-v2.rst and cgroup-v1/memory.rst).
struct ControlGroup {
    folder: PathBuf,
    is_version_2: bool,
}

/// Returns the control groups of this process.
fn control_groups() -> Vec<ControlGroup> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    ControlGroup::all(&groups, Path::new("/sys/fs/cgroup"))
}

impl ControlGroup {
    /// Returns the groups in `groups`, lines of `/proc/self/cgroup`, and those above them, in the
    /// file system at `root`.
    fn all(groups: &str, root: &Path) -> Vec<ControlGroup> {
        let mut all = Vec::new();
        for line in groups.lines() {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
            let (root, is_version_2) = match controllers {
                "" => (root.to_owned(), true),
                _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), false),
                _ => continue,
            };
            let group = root.join(path.trim_start_matches('/'));
            let above = group.ancestors().take_while(|folder| folder.starts_with(&root));
            all.extend(above.map(|folder| ControlGroup { folder: folder.to_owned(), is_version_2 }));
        }
        all
    }

    fn read(&self, version_2: &str, version_1: &str) -> Option<usize> {
        let file = if self.is_version_2 { version_2 } else { version_1 };
        // "max" is no limit
        fs::read_to_string(self.folder.join(file)).ok()?.trim().parse().ok()
    }

    /// Returns the limit of the group, if it has one.
    fn limit(&self) -> Option<usize> {
        self.read("memory.max", "memory.limit_in_bytes")
    }

    /// Returns the part of the limit that is not in use, except by cached files.
    fn free(&self) -> Option<usize> {
        let used = self.read("memory.current", "memory.usage_in_bytes")?;
        let stat = fs::read_to_string(self.folder.join("memory.stat")).ok()?;
        let prefix = if self.is_version_2 { "" } else { "total_" };
        let value = |name: &str| {
            let name = format!("{prefix}{name} ");
            stat.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse::<usize>().ok())
        };
        let files = value("inactive_file").unwrap_or(0) + value("active_file").unwrap_or(0);
        Some(self.limit()?.saturating_sub(used.saturating_sub(files)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_limit_of_a_control_group_and_those_above_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |folder: &str, file: &str, text: &str| {
            fs::create_dir_all(root.path().join(folder)).unwrap();
            fs::write(root.path().join(folder).join(file), text).unwrap();
        };
        write("slurm/job_7/step_0", "memory.max", "max\n");
        write("slurm/job_7", "memory.max", "4096000\n");
        write("slurm/job_7", "memory.current", "1096000\n");
        write("slurm/job_7", "memory.stat", "anon 500\ninactive_file 90000\nactive_file 6000\n");
        write("slurm", "memory.max", "8192000\n");
        write("memory/batch/job", "memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/batch", "memory.limit_in_bytes", "5000000\n");
        write("memory/batch", "memory.usage_in_bytes", "4000000\n");
        write("memory/batch", "memory.stat", "inactive_file 7\ntotal_inactive_file 1000000\n");
        let all = |groups| ControlGroup::all(groups, root.path());
        let limit = |groups| all(groups).iter().filter_map(ControlGroup::limit).min();
        let free = |groups| all(groups).iter().filter_map(ControlGroup::free).min();
        assert_eq!(limit("0::/slurm/job_7/step_0\n"), Some(4_096_000));
        assert_eq!(free("0::/slurm/job_7/step_0\n"), Some(3_096_000));
        assert_eq!(limit("0::/slurm\n"), Some(8_192_000));
        assert_eq!(limit("12:cpuset:/x\n5:cpu,memory:/batch/job\n0::/\n"), Some(5_000_000));
        assert_eq!(free("5:cpu,memory:/batch/job\n"), Some(2_000_000));
        assert_eq!(limit("0::/elsewhere\n"), None);
        assert_eq!(limit("nonsense"), None);
    }

    #[test]
    fn this_machine_has_free_memory_and_no_more_than_its_limit() {
        let (free, limit) = (free_bytes().unwrap(), limit_bytes().unwrap());
        assert!(free > 1 << 20 && free <= limit && limit <= total_bytes().unwrap(), "{free} {limit}");
    }
}
