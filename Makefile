# make demo    build and train LeNet on the embedded digits with two ranks
# make test    every test
# make test-mpich  the tests that are about MPI, built with MPICH and run by its mpiexec
# make soak    200 interruptions, and every program going on from every other's checkpoint; about ten minutes
# make fuzz    1,000 tries with options and files made up at random; about ten minutes
# make slurm-starts  500 starts of a template on a Slurm cluster whose cores are all busy; needs PHALANX_SLURM_UP, see tests/slurm.rs
# make bench   steps per second beside the machine's rate of matrix products, bubbles of pipelines, what checkpoints cost
# make bench-gpu  a step on a GPU beside PyTorch's on the same card, and what the card can do
# make setup   install what is missing: Open MPI, HDF5, libclang; done by all of the above

MPIEXEC ?= mpiexec
RANKS ?= 2
PACKAGES = openmpi-bin libopenmpi-dev libhdf5-dev libclang-dev pkg-config g++ libc6-dev

# more ranks than cores is fine here, waiting ranks yield, and containers run as root
export OMPI_MCA_rmaps_base_oversubscribe = 1
export OMPI_MCA_mpi_yield_when_idle = 1
export OMPI_MCA_hwloc_base_binding_policy = none
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy = none
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1

.PHONY: all demo test test-mpich soak fuzz slurm-starts bench bench-gpu setup packages

all: setup
	cargo build --release

demo: all
	$(MPIEXEC) -n $(RANKS) target/release/sync_sgd --threads 1

test: setup
	cargo test --release

# those that start jobs; the rest is the same whatever the MPI
MPI_TESTS = --test collectives --test equivalence --test layouts --test programs --test strategies --test stopping \
  --test devices --test probe --test agreement

test-mpich: setup
	@command -v mpicc.mpich >/dev/null && command -v mpiexec.mpich >/dev/null \
	  || $(MAKE) --no-print-directory packages PACKAGES="mpich libmpich-dev"
	CARGO_TARGET_DIR=target/mpich MPICC=mpicc.mpich MPIEXEC=mpiexec.mpich cargo test --release $(MPI_TESTS)

soak: setup
	PHALANX_SOAK=200 cargo test --release --test restart -- --nocapture

fuzz: setup
	PHALANX_FUZZ=1000 cargo test --release --test fuzz -- --nocapture

slurm-starts: setup
	PHALANX_SLURM_STARTS=500 cargo test --release --test slurm -- --ignored --nocapture

bench: all
	cargo bench --bench training --bench bubble --bench checkpoints

bench-gpu: all
	cargo bench --bench gpu

# one line of packages, and only where something is missing
setup:
	@command -v mpicc >/dev/null && command -v $(MPIEXEC) >/dev/null && pkg-config --exists hdf5 2>/dev/null \
	  && { [ -n "$$LIBCLANG_PATH" ] || ls /usr/lib/llvm-*/lib /usr/lib*/ /usr/lib/*-linux-gnu 2>/dev/null | grep -q '^libclang.*\.so'; } \
	  || $(MAKE) --no-print-directory packages

packages:
	@command -v apt-get >/dev/null || { \
	  echo "Phalanx needs an MPI (mpicc), HDF5 with its headers, libclang and pkg-config; Debian calls them $(PACKAGES)" >&2; exit 1; }
	@sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; set -ex; $$sudo apt-get update -qq; \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(PACKAGES) >/dev/null
