# The environment of the compute nodes, sourced by every template: the only file here that needs editing.

# EDIT: load MPI and HDF5, for example:
# module load openmpi hdf5
# and, for --device cuda, the toolkit with NVRTC and cuBLASLt, for example:
# module load cuda

# checkpoints do not need HDF5's file locks, which some parallel file systems lack
export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING:-FALSE}

# EDIT: the directory of the programs; the default is where `cargo build --release` puts them
PROGRAMS=${PROGRAMS:-$SLURM_SUBMIT_DIR/target/release}

# EDIT: the directory of checkpoints, on a file system that all nodes share and that outlives the job.
# By default each job has its own; jobs that resume each other's runs name one directory:
# CHECKPOINTS=/scratch/me/run7 sbatch …
CHECKPOINTS=${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}

# EDIT: the launcher: srun or mpiexec. `srun --mpi=list` lists what srun supports; Open MPI needs pmix,
# MPICH pmi2. If that is not the cluster's default, write it here: LAUNCH="srun --mpi=pmix"
LAUNCH=${LAUNCH:-srun}

# Enable this if ranks die in MPI_Init on busy nodes (a crash in mca_btl_tcp before any output of the
# program): Slurm's PMIx plugin releases some ranks from a fence too early, except with "ring". README.md
# has figures.
# export SLURM_PMIX_FENCE=ring
