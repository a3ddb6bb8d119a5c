# make demo          builds everything and trains LeNet on the embedded digits on two ranks
# make test          runs every test
# make test-mpich    builds the tests that start MPI jobs with MPICH and runs most under its mpiexec
# make soak          interrupts runs 200 times and resumes every program from every other's
#                    checkpoint, trains in every layout of up to 8 ranks, flips 1,000 bits that
#                    audits must find, audits a million sound leaves, compares the bits of 4,810
#                    layouts, trains PyTorch's examples in every pipeline, division and way to
#                    reduce gradients on the emulated GPU, and compiles every CUDA kernel for every
#                    generation of GPUs
# make fuzz          tries 1,000 random combinations of options and files; takes about ten minutes
# make slurm-starts  submits 500 jobs to a Slurm cluster whose cores are all busy; needs
#                    PHALANX_SLURM_UP, see tests/cluster/main.rs
# make bench         measures training steps beside the machine's rate of matrix products, the
#                    bubbles of pipelines, and the cost of checkpoints
# make bench-gpu     measures training steps on a GPU beside PyTorch's and the card's own limits
# make setup         installs what is missing (Open MPI, HDF5, libclang); every target does it first

MPIEXEC ?= mpiexec
RANKS ?= 2
PACKAGES = openmpi-bin libopenmpi-dev libhdf5-dev libclang-dev pkg-config g++ libc6-dev

# Allows more ranks than cores, lets waiting ranks yield, and allows root, as in containers.
export OMPI_MCA_rmaps_base_oversubscribe = 1
export OMPI_MCA_mpi_yield_when_idle = 1
export OMPI_MCA_hwloc_base_binding_policy = none
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy = none
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1

.PHONY: all demo test test-mpich build-test build-mpich soak fuzz slurm-starts bench bench-gpu setup packages

all: setup
	cargo build --release

demo: all
	$(MPIEXEC) -n $(RANKS) target/release/sync_sgd --threads 1

test: setup
	cargo test --release

build-test: setup
	cargo test --release --no-run

# the tests whose result may depend on which MPI is used
MPI_TESTS = --test comm --test probe --test devices --test training --test programs
# long ones among them, which only `make test` runs: options that differ between ranks, the outputs of
# predict, networks and texts, what training reaches, what devices do whatever is sent, bits that shorter
# tests compare too, and ranks whose numbers are between those of others
MPI_SKIPPED = ranks_that_are_started_differently_all_say_no predictions:: networks:: texts:: one_hash:: \
  lenet_learns every_model_trains the_teacher_can_be_learnt tensor_mlp_learns the_same_command_gives \
  a_pipeline_ends_with_the_bits_of_one_rank a_pipeline_has_the_bits_of_one_rank traces_are_sound \
  shared_positions footprints audits_ the_same_twice activations_on_their_own \
  hybrid_trains_in_every_layout what_does_not_fit_is_refused a_run_goes_on_from_one_device_on_another \
  a_device_that_is_too_small what_is_missing_is_named a_run_that_blows_up_is_ended \
  the_fastest_products_are_kept \
  a_step_allocates_nothing_and a_host_that_runs_ahead every_program_and_precision_trains \
  recorded_steps_have_the_bits a_file_that_is_no_table \
  kept_samples grids_1_ranks grids_2_ranks grids_3_ranks grids_4_ranks any_layout_allocates \
  options_out_of_range odd_widths pipeline_images initial_weights _5_ranks _6_ranks _7_ranks

MPICH = CARGO_TARGET_DIR=target/mpich MPICC=mpicc.mpich MPIEXEC=mpiexec.mpich

# takes the emulated CUDA libraries, which do not link MPI, from the tests with Open MPI
test-mpich: build-mpich
	@[ ! -d target/tmp/cuda_emulator ] || { mkdir -p target/mpich/tmp \
	  && cp -an target/tmp/cuda_emulator target/mpich/tmp/; }
	$(MPICH) cargo test --release $(MPI_TESTS) -- $(MPI_SKIPPED:%=--skip %)

# takes the dependencies from target/release where they are built, but for those that link MPI
build-mpich: setup
	@command -v mpicc.mpich >/dev/null && command -v mpiexec.mpich >/dev/null \
	  || $(MAKE) --no-print-directory packages PACKAGES="mpich libmpich-dev"
	@[ -d target/mpich ] || [ ! -d target/release/deps ] || { rm -rf target/mpich.new \
	  && mkdir -p target/mpich.new/release \
	  && (cd target/release && cp -a --parents build .fingerprint $$(find deps -name '*.*') ../mpich.new/release) \
	  && CARGO_TARGET_DIR=target/mpich.new cargo clean --quiet --release -p mpi-sys -p phalanx \
	  && mv target/mpich.new target/mpich; }
	$(MPICH) cargo test --release --no-run $(MPI_TESTS)

soak: setup
	PHALANX_SOAK=200 cargo test --release --test files -- restart:: --nocapture
	PHALANX_SOAK=1 cargo test --release --test training -- grids_
	for tests in pipeline_oracles tensor_oracles odd_widths shared_ zero_same_bits the_same_twice; do \
	  PHALANX_SOAK=1 cargo test --release --test cuda -- $$tests || exit 1; done
	PHALANX_SOAK=1 cargo test --release --test training -- audits_
	PHALANX_SOAK=1 cargo test --release --test programs -- one_hash --nocapture
	PHALANX_SOAK=1 cargo test --release --test kernels -- --nocapture

fuzz: setup
	PHALANX_FUZZ=1000 cargo test --release --test fuzz -- --nocapture

slurm-starts: setup
	PHALANX_SLURM_STARTS=500 cargo test --release --test cluster -- --ignored --nocapture

bench: all
	cargo bench --bench training --bench bubble --bench checkpoints

bench-gpu: all
	cargo bench --bench gpu

# installs packages only if something is missing
setup:
	@command -v mpicc >/dev/null && command -v $(MPIEXEC) >/dev/null && pkg-config --exists hdf5 2>/dev/null \
	  && { [ -n "$$LIBCLANG_PATH" ] || ls /usr/lib/llvm-*/lib /usr/lib*/ /usr/lib/*-linux-gnu 2>/dev/null | grep -q '^libclang.*\.so'; } \
	  || $(MAKE) --no-print-directory packages

packages:
	@command -v apt-get >/dev/null || { \
	  echo "Phalanx needs an MPI (mpicc), HDF5 with its headers, libclang and pkg-config; Debian calls them $(PACKAGES)" >&2; exit 1; }
	@sudo=; [ "$$(id -u)" = 0 ] || sudo=sudo; set -ex; $$sudo apt-get update -qq; \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(PACKAGES) >/dev/null
