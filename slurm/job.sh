# What the templates share: starting a program, passing Slurm's warning on to it, and having the job started again.
# Sourced by bash. Nothing to edit.
#
# Before the time is over, or when the job is to make room for another, Slurm sends SIGUSR1 to the batch script
# (--signal=B:USR1@120 in the templates). The script passes it to the launcher, and that to the ranks, which stop after the same
# step, write a checkpoint and exit with 75. Then the script asks Slurm for another start, which goes on from there.
#
# Traps that were fallen into: with a trap on CONT, bash loses USR1, which Slurm sends right behind a CONT. SIGTERM must not be
# passed on to mpiexec: it reaches mpiexec's own helpers first, and they go down with the ranks.

pid= warned=no
trap 'warned=yes; [ -z "$pid" ] || kill -USR1 "$pid" 2>/dev/null' USR1

source "$SLURM_SUBMIT_DIR/slurm/env.sh"

# so many starts without a newer checkpoint are enough
MAX_STARTS=${MAX_STARTS:-5}

# launch PROGRAM ARGUMENTS…: runs it on all tasks of the job to its end; the return code is that of the ranks
launch() {
    local program=$PROGRAMS/$1 threads=${SLURM_CPUS_PER_TASK:-1} launcher
    shift
    [ -x "$program" ] || { echo "there is no program $program: build it, or set PROGRAMS in slurm/env.sh" >&2; return 2; }
    read -ra launcher <<<"$LAUNCH"
    case ${launcher[0]} in
        # a rank that fails takes the step down instead of leaving the others to wait for it
        *srun) launcher+=(--kill-on-bad-exit=1 --cpus-per-task="$threads") ;;
        # Open MPI would pin two ranks of a node to one core each, whatever their share
        *mpiexec* | *mpirun*)
            export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy:-none}
            export PRTE_MCA_hwloc_default_binding_policy=${PRTE_MCA_hwloc_default_binding_policy:-none}
            ;;
    esac
    # GPUs are not bound to tasks here: each rank takes the one of its local rank, and CUDA-aware MPI wants to see them all
    [ "$THREADS_OPTION" = no ] || set -- --threads "$threads" "$@"
    "${launcher[@]}" "$program" "$@" &
    pid=$!
    # a warning that came before there was anyone to pass it on to
    [ "$warned" = no ] || kill -USR1 "$pid" 2>/dev/null
    # `wait` returns when a trap has run, so it is asked again until the launcher is gone, and then knows of none (127)
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

# the name of the newest checkpoint, if there is one
newest() {
    # by its time, for the highest number may be that of a damaged one
    ls -t "$CHECKPOINTS" 2>/dev/null | grep '^step-.*\.h5$' | head -n 1
}

# train PROGRAM ARGUMENTS…: the same with checkpoints, and another start if the run stopped before its end
train() {
    local program=$1 code=0 mark before now last count
    shift
    case " $* " in
        *" --checkpoint-dir"[\ =]*) echo "the directory for checkpoints is CHECKPOINTS in slurm/env.sh" >&2; exit 2 ;;
        # these train nothing
        *" --help "* | *" --version "* | *" --show-schedule"*) launch "$program" "$@"; exit $? ;;
    esac
    echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $program on $SLURM_JOB_NODELIST, $SLURM_NTASKS ranks, $(date -Is)"
    before=$(newest)
    # a job that was started before goes on from its own checkpoints, whatever its first start began with
    [ "${SLURM_RESTART_COUNT:-0}" = 0 ] || [ -z "$before" ] || set -- "$@" --resume auto
    # a program that begins leaves its mark on the directory: srun was seen to return 0 after it had failed to start anything
    mark=$(stat --format=%y "$CHECKPOINTS" 2>/dev/null)
    launch "$program" --checkpoint-dir "$CHECKPOINTS" --watchdog 15m "$@" || code=$?
    if [ "$code" = 0 ] && [ "$mark" = "$(stat --format=%y "$CHECKPOINTS" 2>/dev/null)" ]; then
        echo "${LAUNCH%% *} returned 0, but $program has not begun" >&2
        code=3
    fi
    echo "$program ended with code $code"
    # 0: done; 1 and 2: the program has said what is wrong, and would again; 126 and 127: there is nothing to run. 75: stopped with a
    # checkpoint; all else: a rank, a node or the launcher was lost
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
    # Slurm ends this script as soon as it has heard; it may be restarting itself just now
    local try
    for try in 1 2 3 4 5 6; do
        scontrol requeue "$job" && exit 0
        sleep 10
    done
    exit "$code"
}
