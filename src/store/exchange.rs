//! [`SampleExchange`]: the samples of other nodes, sent one step ahead.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::StoreRanks;
use crate::Result;
use crate::comm::Pending;
use crate::dataset::{ReplicaRows, Sampler};
use crate::trace::{self, Name};

/// The homes of the samples of each step.
pub(super) trait Home {
    /// Returns the rank that sends a sample of `step` to other nodes.
    fn rank(&self, step: u64, sample: usize) -> usize;

    /// Copies the words of a sample of `step` to `row`; its home is this rank.
    ///
    /// # Errors
    /// The sample cannot be read.
    fn copy(&mut self, step: u64, sample: usize, row: &mut [u64]) -> Result<()>;
}

/// The exchange of samples between nodes. Every rank computes who sends which samples to whom, so
/// that messages hold samples alone.
pub(super) struct SampleExchange {
    ranks: StoreRanks,
    row_words: usize,
    /// The messages of a step that has not begun.
    under_way: Option<Messages>,
    /// For each sample that has arrived for the step that has begun, the word at which it starts.
    places: HashMap<usize, usize>,
    /// The words of these samples.
    arrived: Vec<u64>,
    waited: Duration,
}

/// The messages of one step.
struct Messages {
    step: u64,
    sends: Vec<Pending<Vec<i64>>>,
    /// The samples in each message that arrives, in order.
    receives: Vec<(Vec<usize>, Pending<Vec<i64>>)>,
}

impl SampleExchange {
    pub(super) fn new(ranks: &StoreRanks, row_words: usize) -> SampleExchange {
        let (places, arrived) = (HashMap::new(), Vec::new());
        let ranks = ranks.clone();
        SampleExchange { ranks, row_words, under_way: None, places, arrived, waited: Duration::ZERO }
    }

    pub(super) fn waited(&self) -> Duration {
        self.waited
    }

    /// Waits for the samples of `step` and starts the messages of step `next`: those that replicas have in
    /// `rows`. Collective.
    pub(super) fn begin_step(
        &mut self,
        homes: &mut dyn Home,
        sampler: &Sampler,
        rows: &ReplicaRows<'_>,
        step: u64,
        next: Option<u64>,
    ) -> Result<()> {
        let span = trace::work(Name::DataExchange);
        let messages = match self.under_way.take() {
            Some(messages) if messages.step == step => messages,
            other => {
                other.into_iter().for_each(|messages| drop(messages.wait()));
                self.start(homes, sampler, rows, step)?
            }
        };
        self.places.clear();
        self.arrived.clear();
        let began = Instant::now();
        let arrived = messages.wait();
        self.waited += began.elapsed();
        for (samples, words) in arrived {
            for (number, sample) in samples.into_iter().enumerate() {
                self.places.insert(sample, self.arrived.len() + number * self.row_words);
            }
            self.arrived.extend(words.into_iter().map(|word| word as u64));
        }
        if let Some(next) = next {
            self.under_way = Some(self.start(homes, sampler, rows, next)?);
        }
        drop(span);
        Ok(())
    }

    /// Waits for messages that nobody will ask for.
    pub(super) fn finish(&mut self) {
        self.under_way.take().into_iter().for_each(|messages| drop(messages.wait()));
    }

    /// Copies a sample that has arrived for this step to `row`; returns false if it has not.
    pub(super) fn copy(&self, sample: usize, row: &mut [u64]) -> bool {
        let place = self.places.get(&sample);
        if let Some(place) = place {
            row.copy_from_slice(&self.arrived[*place..][..row.len()]);
        }
        place.is_some()
    }

    /// Starts the messages with the samples of `step` whose homes are on other nodes than the ranks
    /// that need them.
    fn start(
        &mut self,
        homes: &mut dyn Home,
        sampler: &Sampler,
        rows: &ReplicaRows<'_>,
        step: u64,
    ) -> Result<Messages> {
        let StoreRanks { all, nodes, replicas, .. } = &self.ranks;
        let mut batch = Vec::new();
        sampler.samples(step, 0..sampler.batch_len(step), &mut batch);
        let home_of: Vec<usize> = batch.iter().map(|sample| homes.rank(step, *sample)).collect();
        let own = all.rank();
        let mut messages = Messages { step, sends: Vec::new(), receives: Vec::new() };
        // receives first, so that no message arrives unexpected
        let mut wanted: HashMap<usize, Vec<usize>> = HashMap::new();
        for position in rows(batch.len(), replicas[own]).into_iter().flatten() {
            if nodes[home_of[position]] != nodes[own] {
                wanted.entry(home_of[position]).or_default().push(batch[position]);
            }
        }
        for (from, samples) in wanted {
            let words = vec![0_i64; samples.len() * self.row_words];
            messages.receives.push((samples, all.start_receive(words, from, TAG)?));
        }
        for to in (0..all.size()).filter(|to| nodes[*to] != nodes[own]) {
            let share = rows(batch.len(), replicas[to]).into_iter().flatten();
            let mut words = Vec::new();
            for position in share.filter(|position| home_of[*position] == own) {
                let start = words.len();
                words.resize(start + self.row_words, 0_i64);
                let row: &mut [u64] = bytemuck::cast_slice_mut(&mut words[start..]);
                homes.copy(step, batch[position], row)?;
            }
            if !words.is_empty() {
                messages.sends.push(all.start_send(words, to, TAG)?);
            }
        }
        Ok(messages)
    }
}

/// The tag of all messages: those of a step arrive before those of the next.
const TAG: i32 = 0;

impl Messages {
    /// Waits for all messages and returns the samples that arrived, with their words.
    fn wait(self) -> Vec<(Vec<usize>, Vec<i64>)> {
        let arrived = self.receives.into_iter().map(|(samples, pending)| (samples, pending.wait())).collect();
        self.sends.into_iter().for_each(|pending| drop(pending.wait()));
        arrived
    }
}
