//! [`Finding`], a difference that an audit found.

use crate::Result;
use crate::comm::Communicator;
use crate::nn::Model;
use crate::parallel::layout::Layout;
use crate::parallel::stage::Stage;
use crate::parallel::watch::{Site, num_bits};

/// A difference between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Finding {
    /// The array.
    pub(super) site: Site,
    /// The rank whose work was repeated.
    pub(super) audited: usize,
    /// The rank that repeated it.
    pub(super) auditor: usize,
    /// The number of bits that differ.
    pub(super) bits: u32,
}

impl Finding {
    /// Returns the finding that is first in the order of the computation, of all ranks of `all`; this
    /// rank found `own` in the work of `audited`. Collective.
    ///
    /// # Errors
    /// None but those of a gather.
    pub(super) fn first(
        all: &Communicator,
        audited: usize,
        own: Option<(Site, u32)>,
    ) -> Result<Option<Finding>> {
        const WORDS: usize = 3;
        let words = own
            .map_or([i64::MAX, 0, 0], |(site, bits)| [site.order() as i64, audited as i64, i64::from(bits)]);
        let mut found = vec![0; WORDS * all.size()];
        all.all_gather(&words, &mut found)?;
        let found = found.as_chunks::<WORDS>().0.iter().enumerate().filter(|(_, words)| words[0] != i64::MAX);
        let first = found.min_by_key(|(_, words)| (words[0], words[1]));
        Ok(first.map(|(auditor, &[order, audited, bits])| Finding {
            site: Site::from_order(order as u64),
            audited: audited as usize,
            auditor,
            bits: bits as u32,
        }))
    }

    /// Describes the finding; `layout` is that of the audited rank. The `witness` is a third rank, and
    /// the one of the two whose bits it has; `last_clean` is the last step whose audit found nothing.
    pub(super) fn describe(
        self,
        step: u64,
        last_clean: Option<u64>,
        layout: &Layout,
        model: &Model,
        witness: Option<(usize, Option<usize>)>,
    ) -> String {
        let Finding { site, audited, auditor, bits } = self;
        let what = describe_site(site, layout, model);
        let how = match site {
            Site::Parameter { .. } | Site::Received { .. } => {
                format!("{what} differs between rank {audited} and rank {auditor}")
            }
            _ => format!("{what} on rank {audited} differs from its repetition on rank {auditor}"),
        };
        let bits = num_bits(bits);
        let verdict = match witness {
            None if matches!(site, Site::Received { .. }) => {
                format!("a repetition of the update confirms rank {audited}")
            }
            None => "no third rank could be asked".to_owned(),
            Some((third, Some(confirmed))) => format!("rank {third} confirms rank {confirmed}"),
            Some((third, None)) => format!("rank {third} agrees with neither"),
        };
        let since = match last_clean {
            None => "no audit since the start of this job was clean".to_owned(),
            Some(step) => format!("the last clean audit was that of step {step}"),
        };
        format!(
            "auditing step {step}: {how} in {bits}; {verdict}; this is a fault of the hardware or of this \
             program, not of the training; {since}"
        )
    }
}

fn describe_site(site: Site, layout: &Layout, model: &Model) -> String {
    let name = |tensor: usize| model.tensors[tensor].name.clone();
    let of_stage = |index: usize| layout.stages.iter().find(|stage| stage.index == index);
    let layer = |stage: &Stage, piece: usize| {
        let number = stage.layer_number(piece);
        let tensors = model.layers[number].tensors.clone().map(name).collect::<Vec<_>>().join(", ");
        if tensors.is_empty() { format!("layer {number}") } else { format!("layer {number} ({tensors})") }
    };
    match site {
        Site::Parameter { tensor } => format!("{} before the step", name(tensor)),
        Site::Value { stage: 0, point: 0, .. } => "the input of the first stage".to_owned(),
        Site::Value { stage, point: 0, .. } => {
            format!("the input of stage {stage}, which stage {} has sent,", stage - 1)
        }
        Site::Value { stage, point, .. } => match of_stage(stage) {
            Some(own) if own.is_layer(point - 1) => {
                format!("the forward pass of {}", layer(own, point - 1))
            }
            Some(own) => format!("the exchange at {} in the forward pass", layer(own, point - 1)),
            None => format!("the forward pass of stage {stage}"),
        },
        Site::Gradient { stage, point, .. } => match of_stage(stage) {
            Some(own) if point == own.num_pieces() && own.head.is_some() => {
                "the gradient of the loss, or the derivative of the last activation".to_owned()
            }
            Some(own) if point == own.num_pieces() => {
                format!("the gradient of the output of stage {stage}, which stage {} has sent,", stage + 1)
            }
            Some(own) if own.is_layer(point) => format!("the backward pass of {}", layer(own, point)),
            Some(own) => format!("the exchange at {} in the backward pass", layer(own, point)),
            None => format!("the backward pass of stage {stage}"),
        },
        Site::WeightGradient { tensor, .. } => format!("the gradient of {}", name(tensor)),
        Site::GradientSum { tensor } => {
            format!("the sum over the replicas of the gradient of {}", name(tensor))
        }
        Site::Update { tensor } => format!("the update of {}", name(tensor)),
        Site::Received { tensor } => format!("{} after the step", name(tensor)),
    }
}
