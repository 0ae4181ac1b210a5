# Functions shared by the sbatch scripts. Sourced in the batch script, after site.sh; nothing here runs by itself.
# shellcheck shell=bash disable=SC2034 # CODE, ENDED, LOGS, OVERRIDES and PART are read by the scripts that source this

# Submitted with --export=NONE, or with a list, a job hands that on to each srun, whose programs then lack even PATH.
unset SLURM_EXPORT_ENV
export PATH

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "this is no job of Slurm's: give the script to sbatch, or run it within salloc" >&2
    exit 64
fi

# For Slurm's commands. The last task of an array has the array's own number in SLURM_JOB_ID, which stands for all tasks.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}
HOSTS=() # the job's nodes, in Slurm's order
STEPS=()
SAVE_BY= # the value of SECONDS by which a save that was asked for must be done; empty: none was asked for

say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }

# check_numbers: refuse settings of site.sh, or of the submitter, that are no number in their range.
check_numbers() {
    local name least most
    while read -r name least most; do
        [[ ${!name} =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "${!name}" -ge "$least" ] && [ "${!name}" -le "$most" ] && continue
        echo "$name=${!name}: must be a whole number from $least to $most; it is set by slurm/site.sh, or as sbatch is called" >&2
        exit 64
    done <<<"LOOP_GPUS_PER_NODE 0 999
LOOP_TRAINER_NODES 1 99999
LOOP_NODE_PORT 1 65535
LOOP_TRAINER_PORT 1 65535
LOOP_MAX_REQUEUES 0 999999999
LOOP_PREFLIGHT_TIMEOUT 1 999999999
LOOP_READY_TIMEOUT 1 999999999
LOOP_SAVE_TIMEOUT 1 999999999
LOOP_CONTROLLER_TIMEOUT 0 999999999
LOOP_LOST_NODE_TIMEOUT 0 999999999"
}

# array_words WORD... [-- WORD...]: sets OVERRIDES to the words before --, and in an array the task's own word after it;
# sets PART to the folder of that task, such as /0-seed-1, else to nothing.
array_words() {
    OVERRIDES=() PART=
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
        OVERRIDES+=("$1")
        shift
    done
    [ $# -gt 0 ] && shift
    [ $# -gt 0 ] || [ -n "${SLURM_ARRAY_TASK_ID:-}" ] || return 0
    if [ "${SLURM_ARRAY_TASK_ID:-$#}" -ge $# ]; then
        echo "array task ${SLURM_ARRAY_TASK_ID:-none}, but $# words after --: one word for each task, from --array=0 on" >&2
        exit 64
    fi
    # A part of an array is a right way to submit one task again; a list that is longer by mistake is told of.
    [ "${SLURM_ARRAY_TASK_COUNT:-$#}" -ge $# ] || say "this array has $SLURM_ARRAY_TASK_COUNT of the $# words after --"
    local words=("$@") chosen name
    chosen=${words[SLURM_ARRAY_TASK_ID]}
    OVERRIDES+=("$chosen")
    name=${chosen##*/} # of a path its last part says enough
    PART=/$SLURM_ARRAY_TASK_ID-${name//[^A-Za-z0-9._-]/-}
}

# refuse_keys KEY...: the scripts set these themselves; a word that sets one of them would be followed by half of the job.
refuse_keys() {
    local key word
    for word in "${OVERRIDES[@]}"; do
        for key in "$@"; do
            if [ "${word%%=*}" = "$key" ]; then
                echo "$word: the script sets $key itself; LOOP_RUNS in slurm/site.sh and RUN say where a run lies" >&2
                exit 64
            fi
        done
    done
}

# check_time_left SECONDS: refuse a job whose time limit is within what saving takes: it would requeue itself at once.
check_time_left() {
    local end left
    end=$(scontrol -o show job "$JOB" 2>/dev/null | grep -o ' EndTime=[0-9][0-9T:-]*') || return 0
    left=$(($(date -d "${end#*=}" +%s) - $(date +%s))) || return 0
    [ "$left" -gt "$1" ] && return
    say "the time limit leaves $left s, and saving may take $1: give sbatch more --time, or lower LOOP_SAVE_TIMEOUT and --signal"
    exit 64
}

# begin_attempt FOLDER: a log folder for this start of the job under FOLDER; sets ATTEMPT and LOGS.
begin_attempt() {
    ATTEMPT=${SLURM_RESTART_COUNT:-0}
    LOGS=$1/logs/job-$SLURM_JOB_ID/attempt-$ATTEMPT
    mkdir -p "$LOGS" || {
        say "cannot make $LOGS: check LOOP_RUNS in slurm/site.sh"
        exit 73
    }
}

# hold_folder FOLDER: one job at a time uses FOLDER. Another job, or a run that somebody started by hand, is named, and
# this job ends with 64 before it has touched anything. An earlier attempt of this job may live on, on a node that Slurm
# does not hear any more: it is waited for, and then this job is requeued.
hold_folder() {
    local lock
    exec 9>>"$1/job.lock" # until this script ends; the steps do not inherit it
    wait_for_lock "$1/job.lock" 9
    for lock in "$1/run.lock" "$1"/node*/node.lock; do # the recipe's own, and those of its rollout nodes
        [ -e "$lock" ] && wait_for_lock "$lock" "$lock"
    done
    echo "job $JOB, attempt $ATTEMPT on $(hostname), since $(date '+%F %T')" >"$1/job.lock"
}

# wait_for_lock FILE TARGET: see hold_folder; TARGET is what flock takes: the file, or a descriptor that holds its lock then.
wait_for_lock() {
    local holder
    is_free "$2" 0 && return
    holder=$(head -n 1 "$1")
    if [ "$ATTEMPT" -eq 0 ] || { [ "$2" = 9 ] && [ "${holder%%,*}" != "job $JOB" ]; }; then
        say "${1%/*} is in use (${holder:-$1 is locked}): wait for its end, stop it, or choose another RUN"
        exit 64
    fi
    say "an earlier attempt of this job lives on ($holder); waiting for its end"
    is_free "$2" "$LOOP_LOST_NODE_TIMEOUT" || requeue
}

# is_free TARGET SECONDS: fails if somebody holds the lock then. Where the file system has none, nobody does.
is_free() {
    local command=()
    [ "$1" = 9 ] || command=(true)
    flock --wait "$2" --conflict-exit-code 9 "$1" "${command[@]}" 2>/dev/null
    [ $? -ne 9 ]
}

# processors_of HOSTS (a,b): how many the job has on each of them, of several the smallest number.
processors_of() {
    # SLURM_JOB_CPUS_PER_NODE is such as 8(x2),4: in the order of the nodes, equal ones together.
    printf '%s\n' "${HOSTS[@]}" | awk -v hosts=",$1," -v cpus="${SLURM_JOB_CPUS_PER_NODE:-}" -v here="${SLURM_CPUS_ON_NODE:-1}" '
        BEGIN {
            count = split(cpus, parts, ",")
            for (part = 1; part <= count; part++) {
                split(parts[part], word, /[(x)]+/)
                for (times = word[2] + !word[2]; times > 0; times--) of[++node] = word[1] + 0
            }
        }
        index(hosts, "," $1 ",") && of[NR] && (!least || of[NR] < least) { least = of[NR] }
        END { print least ? least : here }'
}

# start_step NAME HOSTS LOG COMMAND...: run COMMAND on each of HOSTS (a,b) as a named background step; sets STEP_PID (srun's).
start_step() {
    local name=$1 hosts=$2 log=$3 commas=${2//[^,]/}
    local count=$((${#commas} + 1))
    shift 3
    # --overlap: without it a second step on a node that is in use waits until the first ends.
    # USR1 is the batch script's: one that reaches the steps too (scancel -s USR1 without -b) must not end them.
    # shellcheck disable=SC2016 # the inner shell expands these, on the node
    srun --job-name="$name" --nodes="$count" --ntasks="$count" --nodelist="$hosts" --overlap --cpu-bind=none \
        --cpus-per-task="$(processors_of "$hosts")" --output="$log" --error="$log" --open-mode=append --kill-on-bad-exit=1 \
        bash -c 'trap "" USR1; . "$LOOP_SLURM_DIR/site.sh"; loop_activate; cd "$LOOP_HOME" && exec "$@"' step "$@" 9>&- &
    STEP_PID=$!
    STEPS+=("$name:$STEP_PID")
}

# step_id NAME: Slurm's id of a running step of this job, by its name; step numbers vary.
step_id() { squeue -h -s -j "$JOB" -o '%i %j' | awk -v name="$1" '$2 == name {print $1}'; }

# signal_step SIGNAL NAME: send a signal to a step's processes. Through scancel: srun would turn a TERM into a KILL.
signal_step() {
    local id
    id=$(step_id "$2")
    # Slurm tells of each node without that step, which is no reason for anything.
    [ -n "$id" ] && scancel --signal="$1" "$id" 2> >(grep -v 'Invalid job id specified' >&2)
}

# stop_steps: TERM to every step that still runs, last started first, and wait; KILL after 60 s.
stop_steps() {
    local index name pid
    for ((index = ${#STEPS[@]} - 1; index >= 0; index--)); do
        name=${STEPS[index]%%:*} pid=${STEPS[index]##*:}
        kill -0 "$pid" 2>/dev/null || continue
        signal_step TERM "$name"
        wait_pid "$pid" 60 || {
            say "step $name did not stop on TERM within 60 s; killing it"
            signal_step KILL "$name"
            wait_pid "$pid" 20 || kill -KILL "$pid"
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

# wait_first PID...: until one of the children ends; sets ENDED and CODE. Fails when SAVE_BY has passed.
wait_first() {
    local pid
    while :; do
        for pid in "$@"; do
            kill -0 "$pid" 2>/dev/null && continue
            wait "$pid"
            CODE=$? ENDED=$pid
            return 0
        done
        [ -n "$SAVE_BY" ] && [ "$SECONDS" -ge "$SAVE_BY" ] && return 1
        sleep 1
    done
}

# wait_ready URL PID SECONDS: until GET URL/health answers 200; fails when PID ends or at the deadline.
wait_ready() {
    local url=$1 pid=$2 deadline=$((SECONDS + $3))
    # A proxy for the internet is none for a node beside us.
    until curl --noproxy '*' --silent --fail --max-time 5 --output /dev/null "$url/health"; do
        kill -0 "$pid" 2>/dev/null || return 1
        if [ "$SECONDS" -ge "$deadline" ]; then
            say "no healthy rollout node at $url after $3 s"
            return 1
        fi
        sleep 2
    done
    say "rollout node ready at $url"
}

# ask_controller WORD...: scontrol, asked again for up to LOOP_CONTROLLER_TIMEOUT s while the controller is away (a
# restart, a failover, an upgrade). Prints its answer.
ask_controller() {
    local said code deadline=$((SECONDS + LOOP_CONTROLLER_TIMEOUT))
    while :; do
        said=$(scontrol "$@" 2>&1)
        code=$?
        [ "$code" -ne 0 ] && [ "$SECONDS" -lt "$deadline" ] || break
        case $said in
            *'nable to contact'* | *'timed out'* | *'Connection refused'* | *'ero Bytes'*) ;;
            *) break ;;
        esac
        say "the controller is away, asking it again: $said" >&2
        sleep 10
    done
    printf '%s\n' "$said"
    return "$code"
}

# requeue: put this job back into the queue, at most LOOP_MAX_REQUEUES times; does not return. What Slurm requeues by
# itself (a node that died, a preemption that sends no signal here) is not counted.
# Exit 75 (not finished, nothing lost) when it may not, so that no job waiting for this one takes it for done.
requeue() {
    local own=${LOGS%/*}/requeues said times=0
    [ -e "$own" ] && times=$(wc -l <"$own")
    if [ "$times" -ge "$LOOP_MAX_REQUEUES" ]; then
        say "requeued $times times already (LOOP_MAX_REQUEUES=$LOOP_MAX_REQUEUES): submit the same line again to go on"
        exit 75
    fi
    say "requeueing"
    trap '' TERM # requeueing sends TERM to this script too
    echo "$(date '+%F %T') attempt $ATTEMPT" >>"$own"
    if ! said=$(ask_controller requeue "$JOB"); then
        say "this cluster refuses to requeue ($said): submit the same line again to go on"
        exit 75
    fi
    sleep 60
    exit 0
}

# end_job CODE: exit with CODE. A job that is being preempted requeues instead: in its grace time Slurm sends TERM to the
# steps, but not to this script, so a step that ended says nothing about the run.
end_job() {
    if ask_controller -o show job "$JOB" | grep -q ' PreemptTime=[0-9]'; then
        say "the job is being preempted"
        requeue
    fi
    exit "$1"
}

# is_complete RUN_DIR: the run has done its last iteration, and has its scores.
is_complete() {
    local last
    last=$(sed -n 's/^max_iterations: //p' "$1/config.yaml" 2>/dev/null)
    grep -Eqs '"unscored": ?null' "$1/checkpoints/iteration_$(printf '%04d' "${last:-0}")/state.json"
}

# preflight FOLDER HOST...: one check per node, side by side; names every bad node and what is wrong with it. Each of
# several has to find the others by their names.
preflight() {
    local folder=$1 host bad=0 log pids=() names=()
    shift
    [ $# -gt 1 ] && names=("$@")
    for host in "$@"; do
        srun --job-name="preflight" --nodes=1 --ntasks=1 --nodelist="$host" --overlap --cpu-bind=none \
            --output="$LOGS/preflight-$host.log" --error="$LOGS/preflight-$host.log" \
            timeout --kill-after=5 "$LOOP_PREFLIGHT_TIMEOUT" bash "$LOOP_SLURM_DIR/preflight.sh" "$folder" "${names[@]}" 9>&- &
        pids+=($!)
    done
    for host in "$@"; do
        log=$LOGS/preflight-$host.log
        # A node that hangs or has lost its network ends neither its task nor srun.
        if ! wait_pid "${pids[0]}" $((LOOP_PREFLIGHT_TIMEOUT + 15)); then
            kill -KILL "${pids[0]}"
            CODE=124
        fi
        case $CODE in
            0) ;;
            124 | 137) bad=1 && say "preflight: bad node $host: no answer within $LOOP_PREFLIGHT_TIMEOUT s" ;;
            *) bad=1 && say "preflight: bad node $host: $(reason "$log")" ;;
        esac
        pids=("${pids[@]:1}")
    done
    [ "$bad" -eq 0 ] && say "preflight: $# node(s) good"
    return "$bad"
}

# ranks_on_one_node CONFIG key=value...: of a trainer whose node samples too, by the config. What cannot work is told.
ranks_on_one_node() {
    local ranks
    ranks=$(loop_activate && loop check "$@" --nodes 1 --gpus "$LOOP_GPUS_PER_NODE" | sed -n 's/^trainer  *\([0-9]*\) rank.*/\1/p')
    if [ -z "$ranks" ]; then
        say "loop check $1 names no ranks of the trainer" >&2
        return 1
    fi
    echo "$ranks"
}

# reason LOG: the last line of a preflight's log.
reason() {
    [ -s "$1" ] && tail -n 1 "$1" && return
    echo "the check could not be started there; Slurm's message is above"
}
