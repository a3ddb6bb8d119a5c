//! [`FoldRecord`], the folds of the arrays that a rank has computed for a leaf, and [`Recorder`], which
//! makes one during a step.

use std::collections::BTreeMap;

use super::bits::BitFold;
use super::site::Site;
use crate::Result;
use crate::device::Device;
use crate::parallel::stage::ObservedArray;
use crate::sums::Section;

/// The folds of arrays, by their sites. A tensor that two layers use is one site, with the folds of both in
/// one.
#[derive(Debug, Clone, Default)]
pub struct FoldRecord {
    folds: BTreeMap<u64, BitFold>,
}

impl FoldRecord {
    /// Adds the fold of an array.
    pub fn add(&mut self, site: Site, fold: BitFold) {
        self.add_at(site.order(), fold);
    }

    fn add_at(&mut self, order: u64, fold: BitFold) {
        self.folds.entry(order).and_modify(|of_site| of_site.merge(&fold)).or_insert(fold);
    }

    /// Adds all of another record.
    pub fn extend(&mut self, other: &FoldRecord) {
        other.folds.iter().for_each(|(order, fold)| self.add_at(*order, *fold));
    }

    /// Returns the fold of an array.
    pub fn get(&self, site: Site) -> Option<BitFold> {
        self.folds.get(&site.order()).copied()
    }

    /// Returns the first site at which this record differs from `other`, which has the same sites.
    pub fn first_difference(&self, other: &FoldRecord) -> Option<Site> {
        let differs = |(order, fold): &(&u64, &BitFold)| other.folds.get(order) != Some(fold);
        self.folds.iter().find(differs).map(|(order, _)| Site::from_order(*order))
    }

    /// Returns the record as a message.
    pub fn to_message(&self) -> Vec<i64> {
        let mut message = Vec::with_capacity(self.folds.len() * (BitFold::MESSAGE_LEN + 1));
        for (order, fold) in &self.folds {
            message.push(*order as i64);
            fold.write(&mut message);
        }
        message
    }

    /// Reads a record from a message.
    pub fn from_message(message: &[i64]) -> FoldRecord {
        let entries = message.chunks_exact(BitFold::MESSAGE_LEN + 1);
        let entry = |entry: &[i64]| (entry[0] as u64, BitFold::read(&entry[1..]));
        FoldRecord { folds: entries.map(entry).collect() }
    }
}

/// Returns the fold of the first `len` of the `rows` of every sum in `array`. Not collective.
///
/// # Errors
/// The transfer from the device failed.
pub fn fold_rows<D: Device>(
    device: &D,
    array: &ObservedArray<'_, D>,
    rows: usize,
    len: usize,
) -> Result<BitFold> {
    let mut fold = BitFold::default();
    for start in (0..array.num_sums).map(|sum| sum * rows * array.width) {
        device.read(device.view(array.buffer, start..start + len * array.width), &mut |values| {
            fold.add(values);
            Ok(())
        })?;
    }
    Ok(fold)
}

/// The record of a step that is being made, of the leaf with which the sums of this rank begin.
#[derive(Debug)]
pub struct Recorder {
    /// The folds.
    pub record: FoldRecord,
    /// The number in the model of each tensor of this rank.
    pub tensors: Vec<usize>,
    /// For each micro-batch, its rows in the leaf.
    leaf: Vec<Option<Section>>,
    /// The array in which a bit is flipped, and the number that chooses the bit.
    fault: Option<(Site, u64)>,
}

impl Recorder {
    /// Makes a recorder for micro-batches that are these `sections` of the batch.
    pub fn new(
        tensors: Vec<usize>,
        sections: impl Iterator<Item = Section>,
        fault: Option<(Site, u64)>,
    ) -> Recorder {
        Recorder { record: FoldRecord::default(), tensors, leaf: in_leaf(sections), fault }
    }

    /// Returns the rows of a micro-batch in the leaf, which are its first.
    pub fn in_leaf(&self, micro_batch: usize) -> Option<Section> {
        self.leaf[micro_batch]
    }

    /// Returns the number of a micro-batch among those of the leaf.
    pub fn part(&self, micro_batch: usize) -> usize {
        self.leaf[..micro_batch].iter().flatten().count()
    }

    /// Returns true if a bit is still to be flipped.
    pub fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    /// Returns the number that chooses the bit, if one is flipped at `site`.
    pub fn takes_fault(&mut self, site: Site) -> Option<u64> {
        self.fault.take_if(|(at, _)| *at == site).map(|(_, choice)| choice)
    }
}

/// Returns, for each of the `sections` of a rank, its rows in the leaf with which the rank begins.
fn in_leaf(sections: impl Iterator<Item = Section>) -> Vec<Option<Section>> {
    let mut is_complete = false;
    let of_leaf = |section: Section| {
        let leaf = section.in_first_leaf().filter(|_| !is_complete);
        is_complete |= leaf.is_some_and(Section::is_complete);
        leaf
    };
    sections.map(of_leaf).collect()
}

/// Returns the parts of the leaf with which a rank begins, whose micro-batches are `sections`.
pub fn parts_of_leaf(sections: impl Iterator<Item = Section>) -> Vec<Section> {
    in_leaf(sections).into_iter().flatten().collect()
}
