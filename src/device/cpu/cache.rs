//! The size of a core's L2 cache.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

/// The bytes of an L2 cache where the system does not say.
const USUAL_BYTES: usize = 1 << 20;

/// The least and the most bytes that are believed.
const BELIEVED_BYTES: [usize; 2] = [256 << 10, 4 << 20];

/// Returns the bytes of the L2 cache of a core, on which nothing but speed depends. Cores that share one
/// count as having it alone.
pub(super) fn l2_cache_bytes() -> usize {
    static BYTES: LazyLock<usize> = LazyLock::new(|| {
        let found = read(Path::new("/sys/devices/system/cpu/cpu0/cache"));
        found.map_or(USUAL_BYTES, |bytes| bytes.clamp(BELIEVED_BYTES[0], BELIEVED_BYTES[1]))
    });
    *BYTES
}

/// Reads the size of the L2 cache from `caches`, which has a directory for each cache of a core.
fn read(caches: &Path) -> Option<usize> {
    let text = |cache: &Path, name: &str| fs::read_to_string(cache.join(name)).ok();
    let mut found = fs::read_dir(caches).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let second = found.find(|cache| text(cache, "level").is_some_and(|level| level.trim() == "2"))?;
    let size = text(&second, "size")?;
    size.trim().strip_suffix('K')?.parse::<usize>().ok().map(|kibibytes| kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_l2_cache_is_that_of_level_two() {
        let folder = tempfile::tempdir().unwrap();
        for (name, level, size) in
            [("index0", "1\n", "48K\n"), ("index2", "2\n", "2048K\n"), ("uevent", "", "")]
        {
            let cache = folder.path().join(name);
            fs::create_dir(&cache).unwrap();
            fs::write(cache.join("level"), level).unwrap();
            fs::write(cache.join("size"), size).unwrap();
        }
        assert_eq!(read(folder.path()), Some(2 << 20));
        assert_eq!(read(&folder.path().join("index0")), None);
    }
}
