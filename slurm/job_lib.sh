# Functions shared by the sbatch scripts. Sourced in the batch script, after site.sh; nothing here runs by itself.
# shellcheck shell=bash disable=SC2034 # the scripts that source this read CODE, ENDED, LOGS, OVERRIDES and PART

# A job submitted with --export=NONE, or with a list, hands that on to each srun, whose programs then lack even PATH.
unset SLURM_EXPORT_ENV
export PATH

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "this is not a Slurm job: give the script to sbatch, or run it within salloc" >&2
    exit 64
fi

# The id for Slurm's commands. The last task of an array has the array's number in SLURM_JOB_ID, which means all tasks.
JOB=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
JOB=${JOB:-$SLURM_JOB_ID}
HOSTS=() # the job's nodes, in Slurm's order
STEPS=()
SAVE_BY= # the value of SECONDS by which a requested save must be done; empty: none was requested

say() { printf '%s %s\n' "$(date '+%F %T')" "$*"; }

# check_numbers: refuse settings of site.sh, or of the submitter, that are not whole numbers in their range.
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

# array_words WORD... [-- WORD...]: set OVERRIDES to the words before --, and in an array the task's own word after it;
# set PART to the folder of that task, such as /0-seed-1, else to nothing.
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
    # A part of an array is a good way to submit one task again; the message shows a list that is longer by mistake.
    [ "${SLURM_ARRAY_TASK_COUNT:-$#}" -ge $# ] || say "this array has $SLURM_ARRAY_TASK_COUNT of the $# words after --"
    local words=("$@") chosen name
    chosen=${words[SLURM_ARRAY_TASK_ID]}
    OVERRIDES+=("$chosen")
    name=${chosen##*/} # the last part of a path is enough
    PART=/$SLURM_ARRAY_TASK_ID-${name//[^A-Za-z0-9._-]/-}
}

# refuse_keys KEY...: refuse words that set keys of the scripts' own: only half of the job would follow them.
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

# check_time_left SECONDS: refuse a job whose time limit leaves no time to save: it would requeue itself at once.
check_time_left() {
    local end left
    end=$(scontrol -o show job "$JOB" 2>/dev/null | grep -o ' EndTime=[0-9][0-9T:-]*') || return 0
    left=$(($(date -d "${end#*=}" +%s) - $(date +%s))) || return 0
    [ "$left" -gt "$1" ] && return
    say "the time limit leaves $left s, and saving may take $1: give sbatch more --time, or lower LOOP_SAVE_TIMEOUT and --signal"
    exit 64
}

# begin_attempt FOLDER: make a log folder for this start of the job under FOLDER; sets ATTEMPT and LOGS.
begin_attempt() {
    ATTEMPT=${SLURM_RESTART_COUNT:-0}
    LOGS=$1/logs/job-$SLURM_JOB_ID/attempt-$ATTEMPT
    mkdir -p "$LOGS" || {
        say "cannot make $LOGS: check LOOP_RUNS in slurm/site.sh"
        exit 73
    }
}

# hold_folder FOLDER: lock FOLDER, which one job at a time uses. If another job, or a run that somebody started by hand,
# has it, name that, and end with 64 before this job touches anything. An earlier attempt of this job may live on, on a
# node that Slurm does not hear any more: wait for its end, and then requeue this job.
hold_folder() {
    local lock
    exec 9>>"$1/job.lock" # held until this script ends; the steps do not inherit it
    wait_for_lock "$1/job.lock" 9
    for lock in "$1/run.lock" "$1"/node*/node.lock; do # the recipe's own, and those of its rollout nodes
        [ -e "$lock" ] && wait_for_lock "$lock" "$lock"
    done
    echo "job $JOB, attempt $ATTEMPT on $(hostname), since $(date '+%F %T')" >"$1/job.lock"
}

# wait_for_lock FILE TARGET: see hold_folder; TARGET is flock's: the file, or a descriptor that holds its lock then.
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

# is_free TARGET SECONDS: fails if the lock is still held after SECONDS. A file system without locks holds none.
is_free() {
    local command=()
    [ "$1" = 9 ] || command=(true)
    flock --wait "$2" --conflict-exit-code 9 "$1" "${command[@]}" 2>/dev/null
    [ $? -ne 9 ]
}

# processors_of HOSTS (a,b): print the number of processors that the job has on each of them, the smallest of several.
processors_of() {
    # SLURM_JOB_CPUS_PER_NODE looks like 8(x2),4: in the order of the nodes, equal ones together.
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
    # USR1 is for the batch script: one that reaches the steps too (scancel -s USR1 without -b) must not end them.
    # shellcheck disable=SC2016 # the inner shell expands these, on the node
    srun --job-name="$name" --nodes="$count" --ntasks="$count" --nodelist="$hosts" --overlap --cpu-bind=none \
        --cpus-per-task="$(processors_of "$hosts")" --output="$log" --error="$log" --open-mode=append --kill-on-bad-exit=1 \
        bash -c 'trap "" USR1; . "$LOOP_SLURM_DIR/site.sh"; loop_activate; cd "$LOOP_HOME" && exec "$@"' step "$@" 9>&- &
    STEP_PID=$!
    STEPS+=("$name:$STEP_PID")
}

# step_id NAME: print Slurm's id of a running step of this job, by its name; step numbers vary.
step_id() { squeue -h -s -j "$JOB" -o '%i %j' | awk -v name="$1" '$2 == name {print $1}'; }

# signal_step SIGNAL NAME: send a signal to a step's processes. Through scancel: srun would turn a TERM into a KILL.
signal_step() {
    local id
    id=$(step_id "$2")
    # Slurm prints a line for each node without that step, which does not matter.
    [ -n "$id" ] && scancel --signal="$1" "$id" 2> >(grep -v 'Invalid job id specified' >&2)
}

# stop_steps: send TERM to every step that still runs, last started first, and wait; KILL after 60 s.
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

# wait_first PID...: wait until one of the children ends; sets ENDED and CODE. Fails when SAVE_BY has passed.
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

# wait_ready URL PID SECONDS: wait until GET URL/health answers 200; fails when PID ends or at the deadline.
wait_ready() {
    local url=$1 pid=$2 deadline=$((SECONDS + $3))
    # A proxy for the internet does not lead to a node beside us.
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

# ask_controller WORD...: call scontrol, again for up to LOOP_CONTROLLER_TIMEOUT s while the controller is away (a
# restart, a failover, an upgrade). Prints its answer.
ask_controller() {
    local answer code deadline=$((SECONDS + LOOP_CONTROLLER_TIMEOUT))
    while :; do
        answer=$(scontrol "$@" 2>&1)
        code=$?
        [ "$code" -ne 0 ] && [ "$SECONDS" -lt "$deadline" ] || break
        case $answer in
            *'nable to contact'* | *'timed out'* | *'Connection refused'* | *'ero Bytes'*) ;;
            *) break ;;
        esac
        say "the controller is away, asking it again: $answer" >&2
        sleep 10
    done
    printf '%s\n' "$answer"
    return "$code"
}

# requeue: put this job back into the queue, at most LOOP_MAX_REQUEUES times; does not return. Slurm's own requeues (a
# node that died, a preemption that sends no signal here) do not count.
# Exits with 75 (not finished, nothing lost) when it may not, so that a job waiting for this one does not start.
requeue() {
    local own=${LOGS%/*}/requeues answer times=0
    [ -e "$own" ] && times=$(wc -l <"$own")
    if [ "$times" -ge "$LOOP_MAX_REQUEUES" ]; then
        say "requeued $times times already (LOOP_MAX_REQUEUES=$LOOP_MAX_REQUEUES): submit the same line again to go on"
        exit 75
    fi
    say "requeueing"
    trap '' TERM # requeueing sends TERM to this script too
    echo "$(date '+%F %T') attempt $ATTEMPT" >>"$own"
    if ! answer=$(ask_controller requeue "$JOB"); then
        say "this cluster refuses to requeue ($answer): submit the same line again to go on"
        exit 75
    fi
    sleep 60
    exit 0
}

# end_job CODE: exit with CODE. A job that is being preempted requeues instead: in its grace time Slurm sends TERM to the
# steps, but not to this script, so the exit status of a step means nothing for the run.
end_job() {
    if ask_controller -o show job "$JOB" | grep -q ' PreemptTime=[0-9]'; then
        say "the job is being preempted"
        requeue
    fi
    exit "$1"
}

# is_complete RUN_DIR: fails unless the run has done its last iteration, and has its scores.
is_complete() {
    local last
    last=$(sed -n 's/^max_iterations: //p' "$1/config.yaml" 2>/dev/null)
    grep -Eqs '"unscored": ?null' "$1/checkpoints/iteration_$(printf '%04d' "${last:-0}")/state.json"
}

# preflight FOLDER HOST...: check all nodes, side by side; names every bad node and its problem. Each of several has to
# find the others by their names.
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

# ranks_on_one_node CONFIG key=value...: print the ranks of a trainer whose node samples too, by the config.
ranks_on_one_node() {
    local ranks
    ranks=$(loop_activate && loop check "$@" --nodes 1 --gpus "$LOOP_GPUS_PER_NODE" | sed -n 's/^trainer  *\([0-9]*\) rank.*/\1/p')
    if [ -z "$ranks" ]; then
        say "loop check $1 names no ranks of the trainer" >&2
        return 1
    fi
    echo "$ranks"
}

# reason LOG: print the last line of a preflight's log.
reason() {
    [ -s "$1" ] && tail -n 1 "$1" && return
    echo "the check could not be started there; Slurm's message is above"
}
