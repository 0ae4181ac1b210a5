#!/usr/bin/env bash
# Drill: Harbor's tasks in real containers, without a registry. An image is made by debootstrap and `podman import`; three
# task folders are played by nobody, by nonsense and by their solutions (0, 0, 1), by us and by Harbor's own trial; then
# come attacks on a grade, ten kills, two of Harbor's installed agents in a container, and a training of two iterations.
#
#     bash tests/drills/harbor.sh [WORDS of pytest]     # root, Debian's packages podman, runc and debootstrap: 40 minutes
#
# It ends with 77 where root, a package or an index of packages is missing, with 0 if every test passed.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [[ $(id -u) != 0 ]]; then echo "skipped: it needs root"; exit 77; fi
for command in podman runc debootstrap; do
    if [[ ! $(type -P "$command") ]]; then echo "skipped: it needs $command (apt-get install $command)"; exit 77; fi
done
uv=$(command -v uv || echo .uv/bin/uv)
folder=$(mktemp -d)
trap '[[ ! ${root-} ]] || podman image unmount "$HARBOR_IMAGE" >/dev/null; rm -rf "$folder"' EXIT
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
export CONTAINERS_CONF=$folder/containers.conf OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export HARBOR_IMAGE=localhost/loop-harbor-base HARBOR_AGENT_IMAGE=localhost/loop-harbor-agents HARBOR_PROGRAM=$folder/harbor/bin/harbor
if ! podman image exists "$HARBOR_IMAGE"; then
    debootstrap --variant=minbase --include=python3 stable "$folder/root" >"$folder/log" || { tail -3 "$folder/log"; echo "skipped: debootstrap has no packages"; exit 77; }
    tar -C "$folder/root" -c . | podman import - "$HARBOR_IMAGE"
fi
python=$(podman run --rm "$HARBOR_IMAGE" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Harbor needs a newer Python than this project may have: the image's own, by its own loader.
root=$(podman image mount "$HARBOR_IMAGE")
"$uv" pip install --quiet --python-version "$python" --target "$folder/harbor" harbor==0.26.0 podman-compose==1.6.0 ||
    { echo "skipped: there is no index of Python packages"; exit 77; }
cat >"$folder/harbor/bin/python3" <<END
#!/bin/sh
export PYTHONHOME=$root/usr PYTHONPATH=$folder/harbor\${PYTHONPATH:+:\$PYTHONPATH}
exec $root/usr/lib64/ld-linux-*.so.* --library-path "\$(echo $root/usr/lib/*-linux-gnu)" $root/usr/bin/python3 "\$@"
END
chmod +x "$folder/harbor/bin/python3"
sed -i "1s|.*|#!$folder/harbor/bin/python3|" "$folder"/harbor/bin/{harbor,podman-compose}
if ! podman image exists "$HARBOR_AGENT_IMAGE"; then
    "$uv" pip install --quiet --python-version "$python" --target "$folder/agent" mini-swe-agent==2.4.6 \
        openhands-sdk==1.58.0 openhands-tools==1.58.0 ||
        { echo "skipped: there is no index of Python packages"; exit 77; }
    cp "$folder/harbor/harbor/agents/installed/openhands_sdk_runner.py" "$folder/agent"
    printf 'FROM %s\nCOPY agent /opt/agent\nENV PYTHONPATH=/opt/agent\n' "$HARBOR_IMAGE" >"$folder/Containerfile"
    podman build --quiet -f "$folder/Containerfile" -t "$HARBOR_AGENT_IMAGE" --ignorefile <(echo harbor) "$folder"
fi
.venv/bin/python -m pytest -q -p no:xdist -m drill contrib/tests/integration/test_harbor_containers.py \
    contrib/tests/integration/test_harbor_node.py "$@"
