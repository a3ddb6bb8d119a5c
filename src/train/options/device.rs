//! The options of the device: its kind, the precision of products, and the route of its buffers
//! into messages. [`AnyDevice`] is the device that they open.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValue;
use clap::{Args, ValueEnum};

use super::given::Given;
use super::names::{OrAuto, name_of, or_auto};
use super::peers::map_peers;
use crate::comm::{Awareness, Capabilities, Transfers, World, awareness, library_version};
use crate::device::{Cpu, Cuda, Precision, Vectors};
use crate::memory::MOST_PEERS;
use crate::{Error, Result};

/// The kinds of devices that a user can choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceChoice {
    /// CUDA if every rank can use a GPU, else the CPU
    Auto,
    /// The CPU
    Cpu,
    /// An NVIDIA GPU; the ranks of a node are spread over its GPUs, and may share one
    Cuda,
}

/// The precisions of products. Checkpoints record their names.
impl ValueEnum for Precision {
    fn value_variants<'a>() -> &'a [Precision] {
        &[Precision::F32, Precision::Tf32, Precision::Bf16]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Precision::F32 => ("f32", "32-bit floating point throughout"),
            Precision::Tf32 => {
                ("tf32", "Operands of products rounded to 10 bits of mantissa; the rest in f32 (CUDA only)")
            }
            Precision::Bf16 => (
                "bf16",
                "Activations and operands of products in bfloat16; sums, parameters and the optimizer in f32 \
                 (CUDA only)",
            ),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// The vector instructions of processors.
impl ValueEnum for Vectors {
    fn value_variants<'a>() -> &'a [Vectors] {
        &[Vectors::Widest, Vectors::Avx512, Vectors::Avx2, Vectors::Portable]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Vectors::Widest => ("widest", "The widest that it has"),
            Vectors::Avx512 => ("avx512", "AVX-512"),
            Vectors::Avx2 => ("avx2", "AVX2 with fused multiply-adds"),
            Vectors::Portable => ("portable", "No more than every CPU of the architecture has"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// The routes of a GPU's buffers into messages.
impl ValueEnum for Transfers {
    fn value_variants<'a>() -> &'a [Transfers] {
        &[Transfers::Aware, Transfers::Staged]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Transfers::Aware => (
                "aware",
                "MPI reads and writes the memory of the GPU, without CUDA IPC; refused if it cannot",
            ),
            Transfers::Staged => ("staged", "Values are copied through pinned host memory, without CUDA IPC"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}

/// The options that choose a device.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Machine")]
pub struct DeviceOptions {
    /// Device to compute on
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: DeviceChoice,

    /// Precision of matrix products
    #[arg(long, value_enum, default_value = "f32")]
    pub precision: Precision,

    /// Vector instructions of the CPU; results have the same bits with any of them
    #[arg(long, value_enum, default_value = "widest")]
    pub vectors: Vectors,

    /// Route of values from a GPU into messages
    #[arg(
        long,
        value_parser =
            or_auto::<Transfers>(
                "Within a node of up to 16 ranks by CUDA IPC, if a trial shows that it works: one rank of \
                 each GPU reads and writes the memory of all. Between nodes aware if MPI says that it \
                 accepts the memory of GPUs, otherwise staged"
            ),
        default_value = "auto"
    )]
    pub device_transfers: OrAuto<Transfers>,

    /// File of `probe --json FILE` with the capabilities of this MPI, for --device-transfers auto
    #[arg(long, value_name = "FILE")]
    pub probe: Option<PathBuf>,
}

/// An open device, of the same kind on all ranks.
pub enum AnyDevice {
    /// The CPU.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Box<Cuda>),
}

impl DeviceOptions {
    /// Opens the device, of the same kind on every rank; the CPU with `threads` threads.
    /// Collective.
    ///
    /// # Errors
    /// The device cannot be used, or not with this precision: the same error on every rank.
    pub fn open(&self, world: &World, threads: usize) -> Result<AnyDevice> {
        let all = world.communicator();
        match self.device {
            DeviceChoice::Cpu => self.open_cpu(world, threads),
            DeviceChoice::Cuda => {
                let device = all.agree(self.open_cuda(world))?;
                self.use_cuda(world, device)
            }
            DeviceChoice::Auto => {
                let found = self.open_cuda(world);
                let is_everywhere = all.all_ranks(found.is_ok())?;
                match found {
                    Ok(device) if is_everywhere => return self.use_cuda(world, device),
                    Ok(_) => log::info!("computing on the CPU: another rank cannot use CUDA"),
                    Err(error) => log::info!("computing on the CPU: {error}"),
                }
                self.open_cpu(world, threads)
            }
        }
    }

    /// Refuses the options in `given` that have no effect on the device chosen. Not collective.
    ///
    /// # Errors
    /// An option has no effect.
    pub fn check_used(&self, given: &Given) -> Result<()> {
        let for_cuda = (self.device == DeviceChoice::Cpu)
            .then_some("it is about the memory of GPUs, and --device is cpu");
        let for_auto = (self.device_transfers != OrAuto(None))
            .then_some("it is for --device-transfers auto, and another is chosen");
        let for_cpu =
            (self.device == DeviceChoice::Cuda).then_some("it is about the CPU, and --device is cuda");
        given.refuse("vectors", for_cpu)?;
        given.refuse("device-transfers", for_cuda)?;
        given.refuse("probe", for_cuda.or(for_auto))
    }

    /// Returns the route of device buffers with this MPI. Not collective.
    ///
    /// # Errors
    /// MPI cannot do what is wanted, or the file of --probe cannot be read or is about another MPI.
    fn transfers(&self) -> Result<Transfers> {
        let library = library_version();
        let takes_device_memory = match self.probe.as_deref() {
            Some(path) => probed(path, &library)?,
            None => None,
        };
        let awareness = match takes_device_memory {
            Some(true) => Awareness::Yes("probe"),
            Some(false) => Awareness::No("messages of its memory failed when probe tried"),
            None => awareness(),
        };
        match (self.device_transfers.0, awareness) {
            (Some(Transfers::Staged), _) => Ok(Transfers::Staged),
            (_, Awareness::Yes(_)) => Ok(Transfers::Aware),
            (None, _) => Ok(Transfers::Staged),
            (Some(Transfers::Aware), found) => {
                let says = match found {
                    Awareness::No(who) => who,
                    _ => "it has no MPIX_Query_cuda_support, and MPICH_GPU_SUPPORT_ENABLED is not set",
                };
                let why = format!(
                    "{library} cannot read the memory of a GPU ({says}) and would crash on its first \
                     message; use an MPI that was built with CUDA, or --device-transfers staged"
                );
                Err(Error::input("--device-transfers aware", why))
            }
        }
    }

    /// Sets the route of device buffers, the same on every rank. Collective.
    fn use_cuda(&self, world: &World, device: Box<Cuda>) -> Result<AnyDevice> {
        let transfers = world.communicator().agree(self.transfers())?;
        // a message from device memory needs an aware MPI at both ends
        let are_aware = world.communicator().all_ranks(transfers == Transfers::Aware)?;
        let transfers = if are_aware { Transfers::Aware } else { Transfers::Staged };
        world.communicator().set_transfers(transfers);
        let mut is_mapped = false;
        if world.num_nodes() < world.size() && self.device_transfers == OrAuto(None) {
            match map_peers(world, &device) {
                Ok(()) => {
                    is_mapped = true;
                    if !world.communicator().has_peers() {
                        log::info!(
                            "collective operations use MPI: those by CUDA IPC need nodes of equally many \
                             consecutive ranks, 2 to {MOST_PEERS}, with their GPUs in the same order"
                        );
                    }
                }
                Err(error) => {
                    // the driver does no more work after a fault of a kernel in the trial
                    let usable = device.check().map_err(|fault| {
                        let why = format!("{fault}; avoid it with --device-transfers staged");
                        Error::failed("trying to map the GPU memory of other ranks", why)
                    });
                    world.communicator().agree(usable)?;
                    log::info!("the ranks of a node use MPI for all values: {error}");
                }
            }
        }
        announce(world, &device, transfers, is_mapped);
        Ok(AnyDevice::Cuda(device))
    }

    fn open_cpu(&self, world: &World, threads: usize) -> Result<AnyDevice> {
        let opened = if self.precision == Precision::F32 {
            let fail = || Error::input(format!("--vectors {}", name_of(&self.vectors)), "this CPU has none");
            let with_vectors = |cpu: Cpu| cpu.with_vectors(self.vectors).ok_or_else(fail);
            Cpu::new(threads).and_then(with_vectors).map(AnyDevice::Cpu)
        } else {
            let name = name_of(&self.precision);
            let why = "the CPU computes in f32; choose --device cuda or --precision f32";
            Err(Error::input(format!("--precision {name}"), why))
        };
        world.communicator().agree(opened)
    }

    fn open_cuda(&self, world: &World) -> Result<Box<Cuda>> {
        Cuda::open(world.local_rank(), self.precision).map(Box::new)
    }
}

/// Returns whether messages from device memory work with the MPI `library`, as `probe` found out
/// and wrote to the file `path`; `None` if it did not try. Not collective.
fn probed(path: &Path, library: &str) -> Result<Option<bool>> {
    let found = Capabilities::read(path)?;
    if found.mpi != library {
        let why = format!("it is about {}, and this is {library}; run probe again", found.mpi);
        return Err(Error::input("--probe", why));
    }
    Ok(found.takes_device_memory())
}

/// Logs which device computes, once all ranks know that they can use theirs.
fn announce(world: &World, device: &Cuda, transfers: Transfers, is_mapped: bool) {
    let (ranks, devices) = (world.num_local_ranks(), device.num_devices());
    // a launcher that binds ranks to devices shows each its own
    let shared = if ranks > devices && std::env::var_os("CUDA_VISIBLE_DEVICES").is_none() {
        format!("; {ranks} ranks of this node share {devices}")
    } else {
        String::new()
    };
    let within = match (is_mapped, world.communicator().has_peers()) {
        (true, true) => "; values within a node by CUDA IPC, other",
        (true, false) => "; messages within a node by CUDA IPC, other",
        (false, _) => ";",
    };
    let messages = match transfers {
        _ if world.size() == 1 => String::new(),
        Transfers::Aware => format!("{within} messages from its memory"),
        Transfers::Staged => format!("{within} messages through the host"),
    };
    log::info!("computing on {}{shared}{messages}", device.name());
}
