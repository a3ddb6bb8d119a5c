# What the templates share: starting a program, passing Slurm's warning on to it, and having the job started again.
# Sourced by bash. Nothing to edit.
#
# Before the time is over, or when the job is to make room for another, Slurm sends SIGUSR1 to the batch script
# (--signal=B:USR1@120 in the templates). The script passes it to the launcher, and that to the ranks, which stop after the same
# step, write a checkpoint and exit with 75. Then the script asks Slurm for another start, which goes on from there.
#
# Traps that were fallen into: with a trap on CONT, bash loses USR1, which Slurm sends right behind a CONT. SIGTERM must not be
# passed on to mpiexec: it reaches mpiexec's own helpers first, and they go down with the ranks.

source "$SLURM_SUBMIT_DIR/slurm/env.sh"

# what counts as a start too many: something is wrong if it takes so many
MAX_RESTARTS=${MAX_RESTARTS:-1000}

# launch PROGRAM ARGUMENTS…: runs it on all tasks of the job to its end; the return code is that of the ranks
launch() {
    local program=$PROGRAMS/$1 threads=${SLURM_CPUS_PER_TASK:-1} launcher
    shift
    [ -x "$program" ] || { echo "there is no program $program: build it, or set PROGRAMS in slurm/env.sh" >&2; return 2; }
    read -ra launcher <<<"$LAUNCH"
    case ${launcher[0]} in
        # a rank that fails takes the step down instead of leaving the others to wait for it
        srun) launcher+=(--kill-on-bad-exit=1 --cpus-per-task="$threads") ;;
        # Open MPI would pin two ranks of a node to one core each, whatever their share
        mpiexec) export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none ;;
    esac
    # GPUs are not bound to tasks here: each rank takes the one of its local rank, and CUDA-aware MPI wants to see them all
    [ "$THREADS_OPTION" = no ] || set -- --threads "$threads" "$@"
    "${launcher[@]}" "$program" "$@" &
    pid=$!
    # `wait` returns when a trap has run, so it is asked again until the launcher is gone
    local code=0 last
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

# train PROGRAM ARGUMENTS…: the same with checkpoints, and another start if the run stopped before its end
train() {
    local program=$1 restarts=${SLURM_RESTART_COUNT:-0} code=0
    shift
    echo "job $SLURM_JOB_ID, start $((restarts + 1)): $program on $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks, $(date -Is)"
    # a job that was started before goes on from its own checkpoints, whatever its first start began with
    [ "$restarts" = 0 ] || set -- "$@" --resume auto
    # a program that begins leaves its mark on the directory: srun was seen to return 0 after it had failed to start anything
    local mark
    mark=$(stat --format=%y "$CHECKPOINTS" 2>/dev/null)
    launch "$program" --checkpoint-dir "$CHECKPOINTS" --watchdog 15m "$@" || code=$?
    if [ "$code" = 0 ] && [ "$mark" = "$(stat --format=%y "$CHECKPOINTS" 2>/dev/null)" ]; then
        echo "${LAUNCH%% *} returned 0, but $program has not begun" >&2
        code=1
    fi
    echo "$program ended with code $code"
    # 75: stopped with a checkpoint. After a warning any other failure is taken for an end that came too soon for one
    if [ "$code" = 75 ] || { [ "$code" != 0 ] && [ "$warned" = yes ]; }; then
        [ "$restarts" -lt "$MAX_RESTARTS" ] || { echo "that was start $MAX_RESTARTS; not again" >&2; exit "$code"; }
        local job=$SLURM_JOB_ID
        [ -z "$SLURM_ARRAY_JOB_ID" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
        # Slurm ends this script as soon as it has heard
        exec scontrol requeue "$job"
    fi
    exit "$code"
}

pid= warned=no
trap 'warned=yes; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1
