#!/usr/bin/env bash
# Drill: an image of images/Dockerfile, built from an image that debootstrap and `podman import` make, so without a
# registry of images; two iterations of a file of functions run in it, as an ordinary user and without a network.
#
#     bash tests/drills/image.sh            # root, Debian's packages podman, runc and debootstrap, 12 GB of disk
#
# KEEP=1 leaves the images. Ends with 77 where root or a package is missing, with 0 if every step did what it should.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
if [[ $(id -u) != 0 ]]; then echo "skipped: it needs root"; exit 77; fi
for command in podman runc debootstrap; do
  if [[ ! $(type -P "$command") ]]; then echo "skipped: it needs $command (apt-get install $command)"; exit 77; fi
done
base=localhost/loop-image-base image=localhost/loop-image
folder=$(mktemp -d)
clean() { rm -rf "$folder"; [ -n "${KEEP:-}" ] || podman image rm --force "$image" "$base" >/dev/null 2>&1 || true; }
trap clean EXIT
# Where the kernel has control groups of version 1, and root may not raise its own limits.
cat >"$folder/containers.conf" <<END
[containers]
default_ulimits = ["nofile=1024:$(($(ulimit -Hn) < 4096 ? $(ulimit -Hn) : 4096))", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
END
export CONTAINERS_CONF=$folder/containers.conf
row() { printf '%-30s %s\n' "$1" "$2"; }

began=$SECONDS
if ! podman image exists "$base"; then
  debootstrap --variant=minbase bookworm "$folder/root" >"$folder/log" ||
    { tail -3 "$folder/log"; echo "skipped: debootstrap has no packages"; exit 77; }
  tar -C "$folder/root" -c . | podman import - "$base" >/dev/null 2>&1
  rm -rf "$folder/root"
fi
row "base image" "$((SECONDS - began)) s"

# From the last commit. What this machine sets for pip and certificates is mounted for the build alone.
began=$SECONDS
git -C "$checkout" archive HEAD | tar x -C "$(mkdir -p "$folder/sources" && echo "$folder/sources")"
site=()
[ ! -f "${SSL_CERT_FILE:-}" ] || # ca-certificates adds it to the image's own
  site+=(--volume "$SSL_CERT_FILE:/usr/local/share/ca-certificates/machine.crt:ro" --build-arg SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt)
[ ! -d "${PIP_FIND_LINKS:-}" ] ||
  site+=(--build-arg PIP_FIND_LINKS="$PIP_FIND_LINKS" --volume "$PIP_FIND_LINKS:$PIP_FIND_LINKS:ro")
podman build --quiet --network host --isolation chroot --build-arg BASE="$base" "${site[@]}" \
  -f "$folder/sources/images/Dockerfile" -t "$image" "$folder/sources" >"$folder/log" 2>&1 ||
  { tail -20 "$folder/log"; exit 1; }
row "image" "$((SECONDS - began)) s, $(($(podman image inspect --format '{{.Size}}' "$image") / 1000000)) MB"

install -d -o 1000 "$folder/work"
chmod 755 "$folder"
cp "$checkout/benchmarks/task_files/even.py" "$folder/work"
inside() {
  podman run --rm --network none --cap-drop all --read-only --tmpfs /tmp:exec --tmpfs /home/loop:exec,mode=1777 --env HOME=/home/loop \
    --shm-size 1g --env OMP_NUM_THREADS=1 --volume "$folder/work:/work" "$image" "$@"
}
row "user" "$(inside id -u)"
[ "$(inside id -u)" = 1000 ]
row "loop --version" "$(inside loop --version)"
inside loop try even.py >"$folder/log" 2>&1 || { tail "$folder/log"; exit 1; }
row "loop try" "$(grep "^nothing" "$folder/log")"
began=$SECONDS
model=/opt/torchtune-loop/recipes/loop_recipes/tiny_policy
inside loop train even.py --model "$model" max_iterations=2 collection.tasks_per_iteration=4 >"$folder/log" 2>&1 ||
  { tail -20 "$folder/log"; exit 1; }
row "loop train, 2 iterations" "$((SECONDS - began)) s, $(wc -l <"$folder/work/runs/even/metrics.jsonl") lines of metrics"
[ "$(wc -l <"$folder/work/runs/even/metrics.jsonl")" = 2 ]
