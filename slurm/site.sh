# Site settings: the one file to edit before the first sbatch. Sourced by the sbatch scripts, on every node.
# shellcheck shell=bash
# Give account, partition and time limit to sbatch itself (or as SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT).

# Folder that every node sees: code, environments, model, dataset and runs live under it.
: "${LOOP_HOME:=${SLURM_SUBMIT_DIR:-$PWD}}"
# Folder of runs: <RUNS>/<run name>/.
: "${LOOP_RUNS:=$LOOP_HOME/runs}"
# GPUs a node must have; 0 on a cluster of CPUs (the tests' cluster is one).
: "${LOOP_GPUS_PER_NODE:=8}"
# Number of a training job's nodes that train, each with a copy of the model.
: "${LOOP_TRAINER_NODES:=1}"
# Port of the rollout node, and the one at which trainers of several nodes meet; on a single node it is any free port.
: "${LOOP_NODE_PORT:=8700}"
: "${LOOP_TRAINER_PORT:=29500}"
# Most times that a job requeues itself (USR1, sent before the time limit); Slurm's own requeues do not count.
: "${LOOP_MAX_REQUEUES:=20}"
# Seconds a node has for its preflight: importing torch and vLLM from a cold shared file system can take minutes.
: "${LOOP_PREFLIGHT_TIMEOUT:=300}"
# Seconds the rollout node may take to become healthy: loading 32B twice from a shared file system takes minutes.
: "${LOOP_READY_TIMEOUT:=1800}"
# Seconds the trainer may take for the update in hand when it is asked to save (USR1, or a rollout node that died).
# An update of the 32B config takes about 500 s by arithmetic (docs/operations.md); this leaves room for twice that.
# Give sbatch --signal=B:USR1@N with N at least 120 above this; in train_loop.sbatch it is 1320. A time limit of less than
# an hour needs both lower: LOOP_SAVE_TIMEOUT=240 and --signal=B:USR1@360.
: "${LOOP_SAVE_TIMEOUT:=1200}"

# Seconds for which a job asks a controller again that is away (a restart, a failover, an upgrade).
: "${LOOP_CONTROLLER_TIMEOUT:=900}"
# Seconds for which a requeued job waits for its earlier attempt, if that lives on a node which Slurm does not hear any more.
# At least the cluster's SlurmdTimeout.
: "${LOOP_LOST_NODE_TIMEOUT:=300}"

# Runs inside every job step, on every node: modules, the environment. It cannot put the rest of a step into a container.
# For one, such as that of images/apptainer.def, put programs called python, loop and tune into a folder of your own, and
# that first in PATH in place of the line below. Each has the lines
#   #!/bin/sh
#   exec apptainer exec --nv --bind "$LOOP_HOME" "$LOOP_HOME/torchtune-loop.sif" "$(basename "$0")" "$@"
loop_activate() {
    # module load cuda/13.0
    export PATH="$LOOP_HOME/.venv/bin:$PATH"
    export LOOP_HOME
}

export LOOP_HOME LOOP_RUNS LOOP_GPUS_PER_NODE LOOP_TRAINER_NODES LOOP_NODE_PORT LOOP_TRAINER_PORT LOOP_MAX_REQUEUES
export LOOP_PREFLIGHT_TIMEOUT LOOP_READY_TIMEOUT LOOP_SAVE_TIMEOUT LOOP_CONTROLLER_TIMEOUT LOOP_LOST_NODE_TIMEOUT
