#!/usr/bin/env bash
# Installs the project within an image that is being built, for Dockerfile and apptainer.def: the packages of the lock
# (requirements/$BUILDS.txt) in /opt/torchtune-loop/.venv, which everybody may read and run. Debian 12, as root.
set -euo pipefail
cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive
# A compiler, for what torch and triton compile at run time; vLLM for CPUs loads libnuma.
apt-get update -qq
apt-get install -qq --no-install-recommends ca-certificates g++ gcc libnuma1 make python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
# What a working folder may hold beside the project.
rm -rf .git .venv* .uv .triton runs worlds models build
make --no-print-directory GPU="$([ "$BUILDS" = gpu ] && echo 1 || echo 0)" PYTHON=/usr/bin/python3 ".venv/.installed-$BUILDS"
rm -rf /root/.cache
useradd --create-home --uid 1000 loop
install -d -o loop /work
chmod -R a+rX .
