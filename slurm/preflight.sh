#!/usr/bin/env bash
# Checks a node before a job starts on it: preflight.sh RUN_DIR [NODE...]; each NODE must resolve by its name. The last line of output names the problem.
set -uo pipefail

# shellcheck source=slurm/site.sh
. "$LOOP_SLURM_DIR/site.sh"
loop_activate || { echo "loop_activate failed: check slurm/site.sh"; exit 1; }
RUN_DIR=$1
shift

if [ "$LOOP_GPUS_PER_NODE" -gt 0 ]; then
    found=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ')
    if [ "$found" -ne "$LOOP_GPUS_PER_NODE" ]; then
        echo "$found GPUs answer, LOOP_GPUS_PER_NODE is $LOOP_GPUS_PER_NODE: drain the node or mend slurm/site.sh"
        exit 1
    fi
fi

probe=$RUN_DIR/.preflight-$(hostname)-$$
if ! { echo probe >"$probe" && rm "$probe"; }; then
    echo "$RUN_DIR is not writable here: is the shared file system mounted?"
    exit 1
fi

for name in "$@"; do
    if ! python -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' "$name" 2>/dev/null; then
        echo "the name $name of a node of this job is not found here: put it into DNS or /etc/hosts"
        exit 1
    fi
done

PORTS=(LOOP_NODE_PORT)
[ "$LOOP_TRAINER_NODES" -gt 1 ] && PORTS+=(LOOP_TRAINER_PORT)
for name in "${PORTS[@]}"; do
    if ! python - <<PY; then
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("0.0.0.0", ${!name}))
    except OSError as error:
        sys.exit(f"port ${!name}: {error}")
PY
        echo "port ${!name} is taken: set another $name in slurm/site.sh"
        exit 1
    fi
done

command -v curl >/dev/null || { echo "curl is not installed"; exit 1; }
# The last line, because an import may print too.
if ! cuda=$(python -c 'import torch, torchtune, vllm, loop_recipes, rollout_server; print(torch.version.cuda)' | tail -n 1); then
    echo "imports fail in $(command -v python): run make setup (GPU=1: the CUDA builds), or mend loop_activate in slurm/site.sh"
    exit 1
fi
if [ "$LOOP_GPUS_PER_NODE" -gt 0 ] && [ "$cuda" = None ]; then
    echo "torch in $(command -v python) is a CPU build: run make setup GPU=1, or mend loop_activate in slurm/site.sh"
    exit 1
fi
if [ "$LOOP_GPUS_PER_NODE" -gt 0 ]; then
    # Triton compiles a module when vLLM's first kernel is launched, after the model is loaded.
    compiler=${CC:-$(command -v gcc || command -v clang)}
    header=$(python -c 'import sysconfig; print(sysconfig.get_config_var("INCLUDEPY"))' | tail -n 1)/Python.h
    if [ -z "$compiler" ] || [ ! -f "$header" ]; then
        echo "vLLM needs a C compiler (${compiler:-none found}) and $header when it starts: install gcc and python3-dev"
        exit 1
    fi
fi
echo "good"
