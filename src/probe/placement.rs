//! The placement of a job's ranks on nodes and devices.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::comm::{Awareness, Communicator, World, awareness, library_version};
use crate::device::{Cuda, Precision};

/// The text before the reason why a rank has no device.
const NO_DEVICE: &str = "none: ";

/// MPI's description of itself and of the job.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct JobDescription {
    /// MPI's name and version.
    pub mpi: String,
    /// The thread level that MPI grants.
    pub thread_level: String,
    /// The CUDA-awareness of MPI, and the source of that information.
    pub cuda: String,
    /// The placement of every rank, in order.
    pub places: Vec<Placement>,
}

/// The placement of one rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Placement {
    /// The rank's node, numbered from 0.
    pub node: usize,
    /// The node's name.
    pub host: String,
    /// The rank's number on the node.
    pub local_rank: usize,
    /// The number of cores that the rank may use.
    pub cores: usize,
    /// The rank's GPU, or the reason why it has none.
    pub device: String,
}

impl JobDescription {
    /// Returns true if every rank has a device.
    pub fn has_devices(&self) -> bool {
        self.places.iter().all(|place| !place.device.starts_with(NO_DEVICE))
    }

    /// Returns the number of nodes.
    pub fn num_nodes(&self) -> usize {
        self.places.iter().map(|place| place.node + 1).max().unwrap_or_default()
    }
}

/// Collects the description of the job on rank 0. Collective.
///
/// # Errors
/// There is no memory for messages.
pub fn describe_job(world: &World) -> Result<JobDescription> {
    let device = match Cuda::open(world.local_rank(), Precision::F32) {
        Ok(device) => device.name(),
        Err(error) => format!("{NO_DEVICE}{error}"),
    };
    let place = Placement {
        node: world.node(),
        host: world.host_name(),
        local_rank: world.local_rank(),
        cores: world.num_cores(),
        device,
    };
    Ok(JobDescription {
        mpi: library_version(),
        thread_level: world.thread_level(),
        cuda: match awareness() {
            Awareness::Yes(who) => format!("yes: {who}"),
            Awareness::No(who) => format!("no: {who}"),
            Awareness::Unknown => "it does not say".to_owned(),
        },
        places: collect(world.communicator(), &place)?,
    })
}

/// Gathers every rank's placement on rank 0. Collective.
fn collect(all: &Communicator, own: &Placement) -> Result<Vec<Placement>> {
    let text = serde_json::to_string(own).unwrap_or_default().into_bytes();
    let mut lengths = vec![0; all.size()];
    all.all_gather(&[text.len() as i64], &mut lengths)?;
    let longest = lengths.iter().copied().max().unwrap_or_default() as usize;
    let mut padded = text;
    padded.resize(longest, b' ');
    let mut every = vec![0; longest * all.size()];
    all.gather(&padded, &mut every, 0)?;
    let parse = |text: &[u8]| serde_json::from_slice(text).unwrap_or_default();
    Ok(if all.is_root() { every.chunks(longest.max(1)).map(parse).collect() } else { Vec::new() })
}

/// Formats ranks, nodes, local ranks and devices as a table, followed by the reasons why ranks have
/// no device.
pub fn topology(description: &JobDescription) -> String {
    let mut reasons: Vec<&str> = Vec::new();
    let host = description.places.iter().map(|place| place.host.len()).max().unwrap_or_default().max(4);
    let mut text =
        format!("{:>4} {:>4} {:<host$} {:>10} {:>5} device\n", "rank", "node", "host", "local rank", "cores");
    for (rank, place) in description.places.iter().enumerate() {
        let Placement { node, host: name, local_rank, cores, device } = place;
        let above = rank.checked_sub(1).map(|above| &description.places[above]);
        let is_new = above.is_none_or(|above| above.node != *node);
        let (node, name) = if is_new { (node.to_string(), name.as_str()) } else { (String::new(), "") };
        let device = match device.split_once(NO_DEVICE) {
            Some(("", why)) => {
                reasons.push(why);
                "-"
            }
            _ => device,
        };
        text += &format!("{rank:>4} {node:>4} {name:<host$} {local_rank:>10} {cores:>5} {device}\n");
    }
    reasons.dedup();
    reasons.iter().for_each(|why| text += &format!("no GPU: {why}\n"));
    text
}
