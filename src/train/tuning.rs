//! The file of tuned matrix products (`--tuned-products`).
//!
//! Rank 0 reads it for all at the start, and every device uses the algorithms in it. After the first step
//! of each length of batches, the ranks exchange the names of the products that it lacked. The first rank
//! that formed a product measures it, one product after the other, so that ranks that share a device do not
//! disturb each other. All use its choice, because products that several ranks form must have the same bits.
//! Rank 0 adds the findings to the file. An evaluation's products have the library's first choice.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write as _};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::{create_beside, publish};
use crate::comm::Communicator;
use crate::device::{Device, ProductTable, TunedProduct};
use crate::trace::{self, Name};
use crate::{Error, Result};

/// The tuned products of a run.
pub(super) struct Tuning<'a> {
    path: &'a Path,
    table: ProductTable,
    /// The lengths of batches after whose first step products were measured.
    lengths: Vec<usize>,
}

impl<'a> Tuning<'a> {
    /// Reads the file `path`, if there is one, and gives its products to the device. Collective.
    ///
    /// # Errors
    /// The file cannot be read or has something else in it: the same error on every rank.
    pub(super) fn begin<D: Device>(all: &Communicator, device: &D, path: &'a Path) -> Result<Tuning<'a>> {
        let table = all.agree_with_root(|| read(path))?;
        let table = broadcast(all, &table, 0)?.unwrap_or_default();
        device.use_products(&table);
        Ok(Tuning { path, table, lengths: Vec::new() })
    }

    /// Returns true if no step with a batch of `len` samples has been followed by [`Tuning::tune`].
    pub(super) fn is_due(&self, len: usize) -> bool {
        !self.lengths.contains(&len)
    }

    /// Measures the products that the ranks formed so far and the file lacks, after a step with a batch of
    /// `len` samples. Collective.
    ///
    /// # Errors
    /// A device fails: the same error on every rank.
    pub(super) fn tune<D: Device>(&mut self, all: &Communicator, device: &D, len: usize) -> Result<()> {
        let is_first = self.lengths.is_empty();
        self.lengths.push(len);
        let formed = device.untuned_products();
        let mut owners = BTreeMap::new();
        for rank in 0..all.size() {
            for name in broadcast(all, &formed, rank)? {
                owners.entry(name).or_insert(rank);
            }
        }
        if owners.is_empty() {
            let is_empty = self.table.is_empty();
            if is_first && is_empty && all.is_root() {
                log::warn!("--tuned-products has no effect: no step has products of cuBLASLt");
            } else if is_first && !is_empty {
                log::info!("all matrix products of a step are in {}", self.path.display());
            }
            return Ok(());
        }
        let mut found = ProductTable::new();
        for (name, owner) in &owners {
            let _span = trace::work(Name::Tuning);
            let own = if *owner == all.rank() { device.tune_product(name) } else { Ok(None) };
            let product: Option<TunedProduct> = broadcast(all, &all.agree(own)?, *owner)?;
            found.extend(product.map(|product| (name.clone(), product)));
        }
        self.report(owners.len(), &found);
        let written = all.agree_with_root(|| self.add(&found));
        if let (Err(error), true) = (written, all.is_root()) {
            log::warn!("{error}; the run goes on");
        }
        self.table.extend(found);
        device.use_products(&self.table);
        Ok(())
    }

    /// Adds products to the file, and keeps those that another job has added meanwhile. The new file
    /// replaces the old one as a whole, so a job that is killed leaves one of the two.
    fn add(&self, found: &ProductTable) -> Result<()> {
        let doing = || format!("writing tuned products to {}", self.path.display());
        let failed = |error: std::io::Error| Error::failed(doing(), error);
        let mut all = read(self.path)?;
        for (name, product) in found {
            // an algorithm that this library does not accept any more is replaced
            if self.table.contains_key(name) || !all.contains_key(name) {
                all.insert(name.clone(), product.clone());
            }
        }
        // what a link names is replaced, not the link
        let place = std::fs::canonicalize(self.path).unwrap_or_else(|_| self.path.to_owned());
        let mut file = create_beside(&place).map_err(failed)?;
        let text = serde_json::to_string_pretty(&all).map_err(|error| failed(error.into()))?;
        writeln!(file, "{text}").map_err(failed)?;
        publish(file, &place, &mut |_| ()).map_err(failed)
    }

    /// Logs what was found for `num` products.
    fn report(&self, num: usize, found: &ProductTable) {
        let ratios = found.values().map(|product| product.microseconds_of_first / product.microseconds);
        let ratios: Vec<f64> = ratios.collect();
        let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        let most = ratios.iter().copied().fold(1.0, f64::max);
        let lacking = match num - found.len() {
            0 => String::new(),
            num => format!("; {num} could not be measured"),
        };
        log::info!(
            "measured {} matrix products for {}: {num_faster} are faster than with the first choice, by up \
             to {most:.2} times{lacking}",
            found.len(),
            self.path.display()
        );
    }
}

/// Returns the value of rank `root`. Collective.
fn broadcast<T: Serialize + DeserializeOwned>(all: &Communicator, value: &T, root: usize) -> Result<T> {
    let failed = |error| Error::failed("exchanging tuned products", error);
    let bytes = serde_json::to_vec(value).map_err(failed)?;
    serde_json::from_slice(&all.broadcast_bytes(bytes, root)?).map_err(failed)
}

fn read(path: &Path) -> Result<ProductTable> {
    let fail = |why: &dyn std::fmt::Display| {
        Error::input(format!("reading tuned products from {}", path.display()), why)
    };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(ProductTable::new()),
        Err(error) => return Err(fail(&error)),
        // it would be replaced
        Ok(found) if !found.is_file() => return Err(fail(&"it is no regular file")),
        Ok(_) => {}
    }
    let text = std::fs::read(path).map_err(|error| fail(&error))?;
    if text.is_empty() {
        return Ok(ProductTable::new());
    }
    serde_json::from_slice(&text)
        .map_err(|error| fail(&format!("{error}; give the name of a new file, or of one of an earlier run")))
}
