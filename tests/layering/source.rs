//! The sources as lists of imports, paths and definitions, read from the tokens of each file.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A module, as the names that lead to it from the crate's root.
pub type Module = Vec<String>;

/// A file with Rust or CUDA code.
pub struct Source {
    /// Its path from the root of the repository.
    pub path: String,
    pub text: String,
}

/// A name that a `use` declaration brings into a module.
pub struct Import {
    pub module: Module,
    /// The imported path; for a glob, the path of its module.
    pub path: Vec<String>,
    /// The name in this module; `*` for a glob.
    pub name: String,
    pub is_public: bool,
}

/// The imports, paths and definitions of a Rust file.
#[derive(Default)]
pub struct Contents {
    pub imports: Vec<Import>,
    /// Paths of two or more names outside `use` declarations, and the module that each stands in.
    pub paths: Vec<(Module, Vec<String>)>,
    /// Single names outside `use` declarations.
    pub names: HashSet<String>,
    /// Structs, enums, unions, traits and type aliases.
    pub types: Vec<String>,
    /// Modules with a body in this file.
    pub inline: Vec<Module>,
}

/// Returns all files with Rust or CUDA code in `folders`, in order.
pub fn sources(folders: &[&str]) -> Vec<Source> {
    fn walk(folder: &Path, root: &Path, found: &mut Vec<Source>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let extension = path.extension().unwrap_or_default();
            if path.is_dir() {
                walk(&path, root, found);
            } else if ["rs", "cu", "cuh"].iter().any(|one| extension == *one) {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                found.push(Source { path, text });
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    folders.iter().for_each(|folder| walk(&root.join(folder), root, &mut found));
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Returns the module of a file in `src`, such as `comm::world` for `src/comm/world.rs` and `comm`
/// for `src/comm/mod.rs`.
pub fn module_of(path: &str) -> Module {
    let mut names: Module = path.trim_end_matches(".rs").split('/').skip(1).map(str::to_owned).collect();
    if ["mod", "lib"].contains(&names.last().unwrap().as_str()) {
        names.pop();
    }
    names
}

/// Reads a Rust file. Comments and strings are left out; a macro's arguments are read as they
/// stand.
pub fn read(source: &Source) -> Contents {
    let tokens: TokenStream = source.text.parse().unwrap_or_else(|error| panic!("{}: {error}", source.path));
    let mut contents = Contents::default();
    contents.scan(tokens, &module_of(&source.path), true);
    contents
}

impl Contents {
    /// Reads `tokens` of `module`; `are_items` is false within functions, types and macros.
    fn scan(&mut self, tokens: TokenStream, module: &Module, are_items: bool) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            let next = identifier(&tokens, at + 1);
            match (identifier(&tokens, at).as_deref(), next) {
                // `use<'a>` is a bound
                (Some("use"), _) if !is_mark(&tokens, at + 1, '<') => {
                    let end = (at..tokens.len()).find(|end| is_mark(&tokens, *end, ';')).unwrap();
                    self.import(&tokens[at + 1..end], module, &[], is_public(&tokens[..at]));
                    at = end;
                }
                (Some("mod"), Some(name)) => {
                    at += 2;
                    if let Some(TokenTree::Group(body)) = tokens.get(at) {
                        let inner = [&module[..], &[name]].concat();
                        self.scan(body.stream(), &inner, true);
                        self.inline.push(inner);
                    }
                }
                (Some("struct" | "enum" | "union" | "trait"), Some(name)) => self.types.push(name),
                (Some("type"), Some(name)) if are_items => self.types.push(name),
                (Some(_), _) => {
                    let path = path_at(&tokens, at);
                    at += 3 * (path.len() - 1);
                    self.names.insert(path[0].clone());
                    if path.len() > 1 {
                        self.paths.push((module.clone(), path));
                    }
                }
                (None, _) => {
                    if let TokenTree::Group(group) = &tokens[at] {
                        self.scan(group.stream(), module, false);
                    }
                }
            }
            at += 1;
        }
    }

    /// Reads the tree of a `use` declaration in `module`, below the path `prefix`.
    fn import(&mut self, tree: &[TokenTree], module: &Module, prefix: &[String], is_public: bool) {
        let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
        'branches: for branch in tree.split(is_comma) {
            let (mut path, mut name) = (prefix.to_vec(), None);
            for (at, token) in branch.iter().enumerate() {
                match token {
                    TokenTree::Ident(word) if *word == "as" => {
                        name = identifier(branch, at + 1);
                        break;
                    }
                    TokenTree::Ident(word) => path.push(word.to_string()),
                    TokenTree::Punct(mark) if mark.as_char() == '*' => name = Some("*".to_owned()),
                    TokenTree::Group(group) => {
                        let tree: Vec<TokenTree> = group.stream().into_iter().collect();
                        self.import(&tree, module, &path, is_public);
                        continue 'branches;
                    }
                    _ => {}
                }
            }
            if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            if let Some(name) = name.or(path.last().cloned()) {
                self.imports.push(Import { module: module.clone(), path, name, is_public });
            }
        }
    }
}

fn identifier(tokens: &[TokenTree], at: usize) -> Option<String> {
    match tokens.get(at) {
        Some(TokenTree::Ident(word)) => Some(word.to_string()),
        _ => None,
    }
}

fn is_mark(tokens: &[TokenTree], at: usize, mark: char) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Punct(found)) if found.as_char() == mark)
}

/// Returns true if `before`, which ends where a declaration begins, ends with `pub` or `pub(…)`.
fn is_public(before: &[TokenTree]) -> bool {
    match before {
        [.., TokenTree::Ident(word)] => *word == "pub",
        [.., TokenTree::Ident(word), TokenTree::Group(group)] => {
            *word == "pub" && group.delimiter() == Delimiter::Parenthesis
        }
        _ => false,
    }
}

/// Returns the path that begins with the name at `at`.
fn path_at(tokens: &[TokenTree], mut at: usize) -> Vec<String> {
    let mut path: Vec<String> = identifier(tokens, at).into_iter().collect();
    while is_mark(tokens, at + 1, ':') && is_mark(tokens, at + 2, ':') {
        let Some(name) = identifier(tokens, at + 3) else { break };
        path.push(name);
        at += 3;
    }
    path
}
