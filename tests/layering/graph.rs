//! The graph of the files of the crate: imports and paths, resolved to the files that define the
//! items they name.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::source::{Contents, Import, Module, Source, module_of, read};

/// The files of `src` and the arrows between them.
pub struct Graph {
    /// Paths from the root of the repository.
    pub files: Vec<String>,
    /// For each file, the files that it uses.
    pub arrows: Vec<BTreeSet<usize>>,
    /// [`Graph::arrows`] without those of test code.
    pub arrows_without_tests: Vec<BTreeSet<usize>>,
}

/// The end of a path.
enum Target {
    Module(Module),
    /// An item that this file defines.
    Item(usize),
}

/// The modules of the crate and their imports, for name resolution.
struct Crate<'a> {
    /// The file of every module; a module with a body inside of a file has that file's.
    modules: HashMap<Module, usize>,
    imports: HashMap<&'a Module, Vec<&'a Import>>,
}

impl Graph {
    /// Builds the graph of the Rust files among `sources`, all of which are in `src`.
    pub fn new(sources: &[Source]) -> Graph {
        let files: Vec<String> =
            sources.iter().map(|source| source.path.clone()).filter(|path| path.ends_with(".rs")).collect();
        let read = sources.iter().filter(|source| source.path.ends_with(".rs")).map(read);
        let contents: Vec<Contents> = read.collect();
        let mut all = Crate { modules: HashMap::new(), imports: HashMap::new() };
        for (file, contents) in contents.iter().enumerate() {
            all.modules.insert(module_of(&files[file]), file);
            all.modules.extend(contents.inline.iter().map(|module| (module.clone(), file)));
            for import in &contents.imports {
                all.imports.entry(&import.module).or_default().push(import);
            }
        }
        let mut graph = Graph {
            arrows: vec![BTreeSet::new(); files.len()],
            arrows_without_tests: vec![BTreeSet::new(); files.len()],
            files,
        };
        for (file, contents) in contents.iter().enumerate() {
            graph.add(file, contents, &all);
        }
        graph
    }

    fn add(&mut self, file: usize, contents: &Contents, all: &Crate<'_>) {
        let own = module_of(&self.files[file]);
        for import in &contents.imports {
            // a re-export from a module below is no use unless this file itself names the item
            let is_shown_only = import.is_public && !contents.names.contains(&import.name);
            match all.resolve(&import.path, &import.module, 0) {
                Some(Target::Item(target)) => {
                    let target_module = module_of(&self.files[target]);
                    if !(is_shown_only && target_module.starts_with(&own)) {
                        self.arrow(file, target, &import.module);
                    }
                }
                // the import of a module is no use; the paths that begin with its name are
                Some(Target::Module(module)) if import.name == "*" => {
                    self.arrow(file, all.modules[&module], &import.module);
                }
                Some(Target::Module(_)) | None => {}
            }
        }
        for (module, path) in &contents.paths {
            if let Some(Target::Item(target)) = all.resolve(path, module, 0) {
                self.arrow(file, target, module);
            }
        }
    }

    fn arrow(&mut self, from: usize, to: usize, module: &Module) {
        if from != to {
            self.arrows[from].insert(to);
            if !module.iter().any(|name| name == "tests") {
                self.arrows_without_tests[from].insert(to);
            }
        }
    }

    /// Returns the groups of files that use each other in circles, each in order.
    pub fn circles(&self) -> Vec<Vec<&str>> {
        // files that reach each other form a group; for some hundred files this is fast enough
        let reached: Vec<HashSet<usize>> = (0..self.files.len()).map(|file| self.reached(file)).collect();
        let mut groups: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for file in (0..self.files.len()).filter(|file| reached[*file].contains(file)) {
            let first = (0..=file).find(|one| reached[file].contains(one) && reached[*one].contains(&file));
            groups.entry(first.unwrap()).or_default().push(&self.files[file]);
        }
        groups.into_values().collect()
    }

    /// The arrows between these files, as text.
    pub fn uses_within(&self, files: &[&str]) -> Vec<String> {
        let mut uses = Vec::new();
        for (file, arrows) in self.files.iter().zip(&self.arrows_without_tests) {
            let used = arrows.iter().map(|used| self.files[*used].as_str());
            let used = used.filter(|used| files.contains(&file.as_str()) && files.contains(used));
            uses.extend(used.map(|used| format!("  {file} uses {used}")));
        }
        uses
    }

    fn reached(&self, from: usize) -> HashSet<usize> {
        let (mut found, mut open) = (HashSet::new(), vec![from]);
        while let Some(file) = open.pop() {
            open.extend(self.arrows_without_tests[file].iter().filter(|next| found.insert(**next)));
        }
        found
    }
}

impl Crate<'_> {
    /// Follows `path` from `module`; returns `None` if it leaves the crate.
    fn resolve(&self, path: &[String], module: &Module, depth: usize) -> Option<Target> {
        if depth > 20 {
            return None;
        }
        let mut at = module.clone();
        let mut rest = path;
        match path[0].as_str() {
            "crate" => (at, rest) = (Module::new(), &path[1..]),
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    at.pop();
                    rest = &rest[1..];
                }
            }
            name => match self.find(name, module, depth)? {
                Target::Module(found) => (at, rest) = (found, &path[1..]),
                found @ Target::Item(_) => return Some(found),
            },
        }
        while let Some((name, further)) = rest.split_first() {
            match self.find(name, &at, depth) {
                Some(Target::Module(found)) => (at, rest) = (found, further),
                Some(found) => return Some(found),
                None => return self.modules.get(&at).map(|file| Target::Item(*file)),
            }
        }
        Some(Target::Module(at))
    }

    /// Returns the module below `module` called `name`, or what `module` imports under this name.
    fn find(&self, name: &str, module: &Module, depth: usize) -> Option<Target> {
        let inner = [&module[..], &[name.to_owned()]].concat();
        if self.modules.contains_key(&inner) {
            return Some(Target::Module(inner));
        }
        let imports = self.imports.get(module).map_or(&[][..], Vec::as_slice);
        if let Some(import) = imports.iter().find(|import| import.name == name) {
            return self.resolve(&import.path, module, depth + 1);
        }
        imports.iter().filter(|import| import.name == "*").find_map(|glob| {
            match self.resolve(&glob.path, module, depth + 1)? {
                Target::Module(opened) if opened != *module => self.find(name, &opened, depth + 1),
                _ => None,
            }
        })
    }
}
