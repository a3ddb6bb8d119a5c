//! Which device computes, how exactly, and how its values travel.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::comm::{Awareness, Operation, Transfers, World, awareness, library_version};
use crate::device::{Cpu, Cuda, Precision};
use crate::probe::Findings;
use crate::{Error, Result};

/// Which device computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceName {
    /// CUDA if every rank has a GPU and what it takes to use it, else the processor
    Auto,
    /// The processor
    Cpu,
    /// An NVIDIA GPU; ranks of a node take turns, and may share one
    Cuda,
}

/// How exact products are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrecisionName {
    /// 32-bit floating point throughout
    F32,
    /// Factors of products rounded to 10 bits of mantissa; the rest in f32 (CUDA only)
    Tf32,
    /// Activations and factors of products in bfloat16; sums, parameters and the optimizer in f32 (CUDA only)
    Bf16,
}

impl PrecisionName {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            PrecisionName::F32 => "f32",
            PrecisionName::Tf32 => "tf32",
            PrecisionName::Bf16 => "bf16",
        }
    }
}

/// How buffers of a GPU become messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TransfersName {
    /// Aware if MPI says that it takes the memory of GPUs, else staged
    Auto,
    /// MPI is given the memory of the GPU; refused where it cannot be
    Aware,
    /// Through pinned host memory
    Staged,
}

/// The options that choose a device.
#[derive(Debug, Clone, Args)]
pub struct DeviceOptions {
    /// Where to compute
    #[arg(long, value_enum, default_value = "cpu", help_heading = "Machine")]
    pub device: DeviceName,

    /// How exact products of matrices are
    #[arg(long, value_enum, default_value = "f32", help_heading = "Machine")]
    pub precision: PrecisionName,

    /// How values get from a GPU into messages
    #[arg(long, value_enum, default_value = "auto", help_heading = "Machine")]
    pub device_transfers: TransfersName,

    /// What `probe --json FILE` found out about this MPI: decides --device-transfers auto
    #[arg(long, value_name = "FILE", help_heading = "Machine")]
    pub probe: Option<PathBuf>,
}

/// A device, of one kind on all ranks.
pub enum AnyDevice {
    /// The processor.
    Cpu(Cpu),
    /// A GPU.
    Cuda(Box<Cuda>),
}

impl DeviceOptions {
    /// Opens the device, the same kind on every rank; the processor with `threads` threads. Collective.
    ///
    /// # Errors
    /// It cannot be used, or not with this precision: the same error on every rank.
    pub fn open(&self, world: &World, threads: usize) -> Result<AnyDevice> {
        let all = world.communicator();
        match self.device {
            DeviceName::Cpu => self.open_cpu(world, threads),
            DeviceName::Cuda => {
                let device = all.agree(self.open_cuda(world))?;
                self.use_cuda(world, device)
            }
            DeviceName::Auto => {
                let found = self.open_cuda(world);
                let mut everywhere = [u8::from(found.is_ok())];
                all.all_reduce(&mut everywhere, Operation::Min)?;
                match found {
                    Ok(device) if everywhere == [1] => self.use_cuda(world, device),
                    Ok(_) => {
                        log::info!("computing on the processor: another rank cannot use CUDA");
                        self.open_cpu(world, threads)
                    }
                    Err(error) => {
                        log::info!("computing on the processor: {error}");
                        self.open_cpu(world, threads)
                    }
                }
            }
        }
    }

    /// How messages travel with this MPI. Not collective.
    ///
    /// # Errors
    /// It cannot do what is wanted, or the file of what was found out about it cannot be read or is about another.
    fn transfers(&self) -> Result<Transfers> {
        let library = library_version();
        let found = self.probe.as_ref().map(|path| Findings::read(path)).transpose()?;
        if let Some(found) = found.as_ref().filter(|found| found.description.mpi != library) {
            let why =
                format!("it is about {}, and this is {library}; run probe again", found.description.mpi);
            return Err(Error::input("--probe", why));
        }
        let awareness = match found.and_then(|found| found.takes_device_memory()) {
            Some(true) => Awareness::Yes("probe"),
            Some(false) => Awareness::No("messages of its memory failed when probe tried"),
            None => awareness(),
        };
        match (self.device_transfers, awareness) {
            (TransfersName::Staged, _) => Ok(Transfers::Staged),
            (_, Awareness::Yes(_)) => Ok(Transfers::Aware),
            (TransfersName::Auto, _) => Ok(Transfers::Staged),
            (TransfersName::Aware, found) => {
                let says = match found {
                    Awareness::No(who) => who,
                    _ => "it has no MPIX_Query_cuda_support, and MPICH_GPU_SUPPORT_ENABLED is not set",
                };
                let why = format!(
                    "{library} cannot read the memory of a GPU ({says}) and would crash on its first message; use an MPI that was \
                     built with CUDA, or --device-transfers staged"
                );
                Err(Error::input("--device-transfers aware", why))
            }
        }
    }

    /// Decides how messages travel. Collective.
    fn use_cuda(&self, world: &World, device: Box<Cuda>) -> Result<AnyDevice> {
        let transfers = world.communicator().agree(self.transfers())?;
        // the same everywhere: what one rank hands to MPI another must take
        let mut aware = [u8::from(transfers == Transfers::Aware)];
        world.communicator().all_reduce(&mut aware, Operation::Min)?;
        let transfers = if aware == [1] { Transfers::Aware } else { Transfers::Staged };
        world.communicator().set_transfers(transfers);
        announce(world, &device, transfers);
        Ok(AnyDevice::Cuda(device))
    }

    fn open_cpu(&self, world: &World, threads: usize) -> Result<AnyDevice> {
        let opened = if self.precision == PrecisionName::F32 {
            Cpu::new(threads).map(AnyDevice::Cpu)
        } else {
            let name = self.precision.name();
            let why = "the processor computes in f32; choose --device cuda or --precision f32";
            Err(Error::input(format!("--precision {name}"), why))
        };
        world.communicator().agree(opened)
    }

    fn open_cuda(&self, world: &World) -> Result<Box<Cuda>> {
        let precision = match self.precision {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Tf32 => Precision::Tf32,
            PrecisionName::Bf16 => Precision::Bf16,
        };
        Cuda::open(world.local_rank(), precision).map(Box::new)
    }
}

/// Says on what is computed, once all ranks know that they can.
fn announce(world: &World, device: &Cuda, transfers: Transfers) {
    let (ranks, devices) = (world.num_local_ranks(), device.num_devices());
    // a launcher that binds ranks to devices shows each its own
    let shared = if ranks > devices && std::env::var_os("CUDA_VISIBLE_DEVICES").is_none() {
        format!("; {ranks} ranks of this node share {devices}")
    } else {
        String::new()
    };
    let messages = match transfers {
        _ if world.size() == 1 => "",
        Transfers::Aware => "; messages from its memory",
        Transfers::Staged => "; messages through the host",
    };
    log::info!("computing on {}{shared}{messages}", device.name());
}
