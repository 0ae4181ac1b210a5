#!/usr/bin/env bash
# Drill: Harbor's tasks in real containers, without a registry. An image is made by debootstrap and `podman import`; three
# task folders are played by nobody, by nonsense and by their solutions (0, 0, 1); then come the attacks on a grade.
#
#     bash tests/drills/harbor.sh [WORDS of pytest]     # root, Debian's packages podman, runc and debootstrap: 12 minutes
#
# It ends with 77 where root or a package is missing, with 0 if every test passed.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ $(id -u) != 0 ]]; then echo "skipped: it needs root"; exit 77; fi
for command in podman runc debootstrap; do
    if [[ ! $(type -P "$command") ]]; then echo "skipped: it needs $command (apt-get install $command)"; exit 77; fi
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Where the kernel has control groups of version 1, and root may not raise its own limits.
cat >"$folder/containers.conf" <<END
[containers]
default_ulimits = ["nofile=1024:$(($(ulimit -Hn) < 4096 ? $(ulimit -Hn) : 4096))", "nproc=4096:4096"]
netns = "none"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
END
export CONTAINERS_CONF=$folder/containers.conf HARBOR_IMAGE=localhost/loop-harbor-base
if ! podman image exists "$HARBOR_IMAGE"; then
    debootstrap --variant=minbase stable "$folder/root" >"$folder/log" || { tail -3 "$folder/log"; echo "skipped: debootstrap has no packages"; exit 77; }
    tar -C "$folder/root" -c . | podman import - "$HARBOR_IMAGE"
fi
.venv/bin/python -m pytest -q -p no:xdist -m drill contrib/tests/integration/test_harbor_containers.py "$@"
