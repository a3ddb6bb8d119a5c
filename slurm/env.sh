# What the compute nodes need: the only file here that has to be edited. Sourced by every template, by bash.

# EDIT: whatever makes MPI and HDF5 available, such as
# module load openmpi hdf5
# and, for --device cuda, the toolkit with NVRTC and cuBLASLt, such as
# module load cuda

# checkpoints need none of HDF5's locks, which some parallel file systems do not have
export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING:-FALSE}

# EDIT: where the programs are; here, where `cargo build --release` in the checkout leaves them
PROGRAMS=${PROGRAMS:-$SLURM_SUBMIT_DIR/target/release}

# EDIT: where checkpoints go: a directory that all nodes share, and that outlives the job. One for each job; jobs that are to go
# on from each other name one directory: CHECKPOINTS=/scratch/me/run7 sbatch …
CHECKPOINTS=${CHECKPOINTS:-$SLURM_SUBMIT_DIR/checkpoints/$SLURM_JOB_NAME-${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}

# EDIT: how ranks are started: srun, or mpiexec. `srun --mpi=list` shows what srun can talk to: pmix for Open MPI, pmi2 for
# MPICH; if that is not the cluster's default, put it here: LAUNCH="srun --mpi=pmix"
LAUNCH=${LAUNCH:-srun}

# Enable this where ranks die in MPI_Init on busy nodes (a crash in mca_btl_tcp before the program has said anything): Slurm's PMIx plugin
# lets some ranks out of a fence early, and "ring" does not. README.md has figures.
# export SLURM_PMIX_FENCE=ring
