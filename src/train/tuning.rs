//! The file of tuned matrix products (`--tuned-products`).
//!
//! Rank 0 reads it for all at the start, and every device uses the algorithms in it. After the first step of
//! the run, the ranks exchange the names of the products that it lacked. The first rank that formed a product
//! measures it, and all use its choice, because products that several ranks form must have the same bits.
//! Rank 0 adds the findings to the file. Products that first occur later, as in an evaluation, have the
//! library's first choice in this run and in later ones.

use std::io::Write as _;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::create_beside;
use crate::comm::Communicator;
use crate::device::{Device, ProductTable, TunedProduct};
use crate::{Error, Result};

/// The tuned products of a run.
pub(super) struct Tuning<'a> {
    path: &'a Path,
    table: ProductTable,
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
        Ok(Tuning { path, table })
    }

    /// Measures the products that the ranks formed so far and the file lacks. Collective.
    ///
    /// # Errors
    /// A device fails: the same error on every rank.
    pub(super) fn tune<D: Device>(&mut self, all: &Communicator, device: &D) -> Result<()> {
        let mut unmeasured = Vec::new();
        let mut own = Vec::new();
        let formed = device.untuned_products();
        for rank in 0..all.size() {
            for name in broadcast(all, &formed, rank)? {
                if !unmeasured.contains(&name) {
                    if rank == all.rank() {
                        own.push(name.clone());
                    }
                    unmeasured.push(name);
                }
            }
        }
        if unmeasured.is_empty() {
            log::info!("all matrix products of a step are in {}", self.path.display());
            return Ok(());
        }
        let measure = |name: String| Ok(device.tune_product(&name)?.map(|product| (name, product)));
        let measured: Result<Vec<Option<(String, TunedProduct)>>> = own.into_iter().map(measure).collect();
        let measured: ProductTable = all.agree(measured)?.into_iter().flatten().collect();
        for rank in 0..all.size() {
            self.table.extend(broadcast(all, &measured, rank)?);
        }
        device.use_products(&self.table);
        self.report(&unmeasured);
        if let Err(error) = all.agree_with_root(|| write(self.path, &self.table))
            && all.is_root()
        {
            log::warn!("{error}; the run goes on");
        }
        Ok(())
    }

    fn report(&self, names: &[String]) {
        let ratios = names.iter().filter_map(|name| self.table.get(name));
        let ratios: Vec<f64> =
            ratios.map(|product| product.microseconds_of_first / product.microseconds).collect();
        let num_faster = ratios.iter().filter(|ratio| **ratio > 1.0).count();
        let most = ratios.iter().copied().fold(1.0, f64::max);
        let lacking = match names.len() - ratios.len() {
            0 => String::new(),
            num => format!("; {num} could not be measured for want of memory"),
        };
        log::info!(
            "measured {} matrix products for {}: {num_faster} are faster than with the first choice, by up \
             to {most:.2} times{lacking}",
            ratios.len(),
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
    let doing = || format!("reading tuned products from {}", path.display());
    match std::fs::read(path) {
        Ok(text) if text.is_empty() => Ok(ProductTable::new()),
        Ok(text) => serde_json::from_slice(&text).map_err(|error| {
            Error::input(
                doing(),
                format!("{error}; give the name of a new file, or of one of an earlier run"),
            )
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(ProductTable::new()),
        Err(error) => Err(Error::input(doing(), error)),
    }
}

/// Writes a whole file in place of the one before, so that a job that is killed leaves one of them.
fn write(path: &Path, table: &ProductTable) -> Result<()> {
    let failed =
        |error: std::io::Error| Error::failed(format!("writing tuned products to {}", path.display()), error);
    let mut file = create_beside(path).map_err(failed)?;
    let text = serde_json::to_string_pretty(table).map_err(|error| failed(error.into()))?;
    writeln!(file, "{text}").map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    Ok(())
}
