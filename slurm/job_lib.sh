# Functions shared by the sbatch scripts. Sourced in the batch script, after site.sh; nothing here runs by itself.
# shellcheck shell=bash disable=SC2034 # CODE and ENDED are read by the scripts that source this

STEPS=()

say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }

# start_step NAME HOST LOG COMMAND...: run COMMAND as a named background step on HOST; sets STEP_PID (srun's).
start_step() {
    local name=$1 host=$2 log=$3
    shift 3
    # --overlap: without it a second step on a node that is in use waits until the first ends.
    # shellcheck disable=SC2016 # the inner shell expands these, on the node
    srun --job-name="$name" --nodes=1 --ntasks=1 --nodelist="$host" --overlap --cpu-bind=none \
        --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --output="$log" --error="$log" --open-mode=append --kill-on-bad-exit=1 \
        bash -c '. "$LOOP_SLURM_DIR/site.sh"; loop_activate; cd "$LOOP_HOME" && exec "$@"' step "$@" &
    STEP_PID=$!
    STEPS+=("$name:$STEP_PID")
}

# step_id NAME: Slurm's id of a running step of this job, by its name; step numbers vary.
step_id() { squeue -h -s -j "$SLURM_JOB_ID" -o '%i %j' | awk -v name="$1" '$2 == name {print $1}'; }

# stop_steps: TERM to every step that still runs, last started first, and wait; KILL after 60 s.
# TERM goes through scancel: a TERM to srun itself would reach the tasks as KILL.
stop_steps() {
    local index name pid id
    for ((index = ${#STEPS[@]} - 1; index >= 0; index--)); do
        name=${STEPS[index]%%:*} pid=${STEPS[index]##*:}
        kill -0 "$pid" 2>/dev/null || continue
        id=$(step_id "$name")
        [ -n "$id" ] && scancel --signal=TERM "$id"
        wait_pid "$pid" 60 || {
            say "step $name did not stop on TERM within 60 s; killing it"
            [ -n "$id" ] && scancel --signal=KILL "$id"
            wait_pid "$pid" 20
        }
    done
}

# wait_pid PID SECONDS: wait for a child with a deadline; sets CODE to its exit status. Fails at the deadline.
wait_pid() {
    local pid=$1 deadline=$((SECONDS + $2))
    while kill -0 "$pid" 2>/dev/null; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.5
    done
    wait "$pid" 2>/dev/null
    CODE=$?
}

# wait_either PID PID: until one of two children ends; sets ENDED and CODE. A trapped signal does not end the wait.
wait_either() {
    while :; do
        ENDED=
        wait -n -p ENDED "$@"
        CODE=$?
        [ -n "${ENDED:-}" ] && return 0
    done
}

# wait_ready URL PID SECONDS: until GET URL/health answers 200; fails when PID ends or at the deadline.
wait_ready() {
    local url=$1 pid=$2 deadline=$((SECONDS + $3))
    until curl --silent --fail --max-time 5 --output /dev/null "$url/health"; do
        kill -0 "$pid" 2>/dev/null || return 1
        if [ "$SECONDS" -ge "$deadline" ]; then
            say "no healthy rollout node at $url after $3 s"
            return 1
        fi
        sleep 2
    done
    say "rollout node ready at $url"
}

# preflight HOST...: one check per node, side by side; names every bad node and what is wrong with it.
preflight() {
    local host bad=0 log pids=()
    for host in "$@"; do
        srun --job-name="preflight" --nodes=1 --ntasks=1 --nodelist="$host" --overlap --cpu-bind=none \
            --output="$LOGS/preflight-$host.log" --error="$LOGS/preflight-$host.log" \
            timeout 300 bash "$LOOP_SLURM_DIR/preflight.sh" "$RUN_DIR" &
        pids+=($!)
    done
    for host in "$@"; do
        wait "${pids[0]}" || {
            bad=1
            log=$LOGS/preflight-$host.log
            say "preflight: bad node $host: $(tail -n 1 "$log" 2>/dev/null || echo "no answer")"
        }
        pids=("${pids[@]:1}")
    done
    [ "$bad" -eq 0 ] && say "preflight: $# node(s) good"
    return "$bad"
}
