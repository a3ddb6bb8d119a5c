# The shared part of the templates: starts a program, forwards Slurm's warning to it, and requeues
# the job. Sourced by bash. Nothing here needs editing.
#
# Before the time limit, or when the job is preempted, Slurm sends SIGUSR1 to the batch script
# (--signal=B:USR1@120 in the templates). The script forwards it to the launcher, and the launcher to
# the ranks, which stop after the same step, write a checkpoint and exit with 75. The script then
# requeues the job, and the next start resumes from the checkpoint.
#
# Known traps: with a trap on CONT, bash loses USR1, which Slurm sends right after a CONT. SIGTERM must
# not be forwarded to mpiexec: it reaches mpiexec's daemons first, which take the ranks down.

pid= warned=no
trap 'warned=yes; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1

source "$SLURM_SUBMIT_DIR/slurm/env.sh"

# starts without a newer checkpoint after which the job is not requeued again
MAX_STARTS=${MAX_STARTS:-5}

# launch PROGRAM ARGUMENTS…: runs the program on all tasks of the job; returns the exit code of the ranks
launch() {
    local program=$PROGRAMS/$1 threads=${SLURM_CPUS_PER_TASK:-1} launcher
    shift
    [ -x "$program" ] || { echo "there is no program $program: build it, or set PROGRAMS in slurm/env.sh" >&2; return 2; }
    read -ra launcher <<<"$LAUNCH"
    case ${launcher[0]} in
        # a failed rank ends the step, so that the others do not wait for it
        *srun) launcher+=(--kill-on-bad-exit=1 --cpus-per-task="$threads") ;;
        # Open MPI would pin each of two ranks on a node to one core, however many it has
        *mpiexec* | *mpirun*)
            export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-none}
            export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
            # a rank waits two seconds for its launcher to confirm MPI_Finalize; without this, a launcher
            # that was busy for longer fails a job that is done (open-mpi/ompi#13344)
            export OMPI_MCA_orte_allowed_exit_without_sync=${OMPI_MCA_orte_allowed_exit_without_sync:-1}
            ;;
    esac
    # GPUs are not bound to tasks: each rank picks one by its local rank, and a CUDA-aware MPI needs to
    # see all of them
    [ "$THREADS_OPTION" = no ] || set -- --threads "$threads" "$@"
    "${launcher[@]}" "$program" "$@" &
    pid=$!
    # forwards a warning that came before the launcher was started
    [ "$warned" = no ] || kill -USR1 "$pid" 2>/dev/null
    # `wait` also returns when a trap has run, so it is repeated until the launcher has ended; after that
    # it returns 127
    local code=127 last
    while :; do
        wait "$pid" 2>/dev/null
        last=$?
        [ "$last" = 127 ] || code=$last
        kill -0 "$pid" 2>/dev/null && continue
        wait "$pid" 2>/dev/null
        last=$?
        [ "$last" = 127 ] || code=$last
        break
    done
    pid=
    return "$code"
}

# newest: prints the name of the newest checkpoint, if there is one
newest() {
    # by modification time, because the checkpoint with the highest number may be damaged
    ls -t "$CHECKPOINTS" 2>/dev/null | grep '^step-.*\.h5$' | head -n 1
}

# train PROGRAM ARGUMENTS…: launches with checkpoints, and requeues the job if the run stopped before its end
train() {
    local program=$1 code=0 mark before now last count
    shift
    case " $* " in
        *" --checkpoint-dir"[\ =]*) echo "--checkpoint-dir: the template sets it; give CHECKPOINTS=DIR before sbatch, or set it in slurm/env.sh" >&2; exit 2 ;;
        # these options do not train
        *" --help "* | *" -h "* | *" --version "* | *" -V "* | *" --show-schedule"* | *" --show-network "*) launch "$program" "$@"; exit $? ;;
    esac
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $program on $SLURM_JOB_NODELIST, ${ranks:-$SLURM_NTASKS} ranks, $(date -Is)"
    before=$(newest)
    # a requeued job resumes from its own checkpoints, whatever its first start began with
    [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ -z "$before" ] || set -- "$@" --resume auto
    # a program that starts changes the directory: srun was seen to return 0 after failing to start anything
    mark=$(stat --format=%y "$CHECKPOINTS" 2>/dev/null)
    launch "$program" --checkpoint-dir "$CHECKPOINTS" --watchdog 15m "$@" || code=$?
    if [ "$code" = 0 ] && [ "$mark" = "$(stat --format=%y "$CHECKPOINTS" 2>/dev/null)" ]; then
        echo "${LAUNCH%% *} returned 0, but $program has not begun" >&2
        code=3
    fi
    echo "$program ended with code $code"
    # 0: done. 1 and 2: the program has reported an error and would again. 126 and 127: the launcher, or a
    # library of the program, was not found. 75: stopped with a checkpoint. Any other code: a rank, a node or
    # the launcher was lost
    case $code in
        0 | 2 | 126 | 127) exit "$code" ;;
        1) [ "$warned" = yes ] || exit 1 ;;
    esac
    now=$(newest)
    now=${now:-none}
    [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ ! -e "$CHECKPOINTS/.starts" ] || read -r last count <"$CHECKPOINTS/.starts"
    if [ "$last" = "$now" ]; then count=$((count + 1)); else count=1; fi
    mkdir -p "$CHECKPOINTS" && echo "$now $count" >"$CHECKPOINTS/.starts"
    if [ "$count" -ge "$MAX_STARTS" ]; then
        echo "$count starts have brought no newer checkpoint than this: $now; not again" >&2
        exit "$code"
    fi
    local job=$SLURM_JOB_ID
    [ -z "$SLURM_ARRAY_JOB_ID" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    # Slurm ends this script as soon as the request arrives; slurmctld may be restarting, so try again
    local try
    for try in 1 2 3 4 5 6; do
        scontrol requeue "$job" && exit 0
        sleep 10
    done
    exit "$code"
}
