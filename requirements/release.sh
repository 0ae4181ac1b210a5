#!/usr/bin/env bash
# Makes and checks what is uploaded for a release: requirements/release.sh FOLDER [REPOSITORY]; `make release` calls it.
#
# From the last commit, not from the working folder: an sdist and a wheel of the core and of contrib, and notes.md out of
# CHANGELOG.md. REPOSITORY, the address of the repository, takes the place of that word in README.md and CITATION.cff.
set -euo pipefail
out=$(mkdir -p "$1" && cd "$1" && pwd) repository=${2:-}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() { echo "error: $*" >&2; exit 1; }

git archive HEAD | tar x -C "$folder"
if [ -n "$repository" ]; then
  sed -i "s#\bREPOSITORY\b#$repository#" "$folder/README.md" "$folder/CITATION.cff"
fi
versions=$(grep -h '^version = ' "$folder"/{pyproject.toml,contrib/pyproject.toml} | cut -d'"' -f2 | sort -u)
[ "$(wc -l <<<"$versions")" = 1 ] || fail "pyproject.toml and contrib/pyproject.toml have two versions: $versions"
grep -q "^version: $versions\$" CITATION.cff || fail "CITATION.cff has another version than pyproject.toml ($versions)"
sed -n "/^## \[$versions\]/,/^## \[/{/^## \[/d;p}" CHANGELOG.md >"$out/notes.md"
[ -s "$out/notes.md" ] || fail "CHANGELOG.md has no section [$versions]"

"$python" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet build twine
for project in "$folder" "$folder/contrib"; do
  "$folder/venv/bin/python" -m build --outdir "$out" "$project" >"$folder/log" 2>&1 || { tail "$folder/log"; fail "see above"; }
done
"$folder/venv/bin/twine" check --strict "$out"/*"$versions"*
"$python" - "$out" "$versions" <<'END'
import email, pathlib, sys, tarfile, zipfile

out, version = pathlib.Path(sys.argv[1]), sys.argv[2]
NEEDED = {
    "torchtune_loop": """loop_recipes/recipes/loop_appworld.py loop_recipes/recipes/configs/machines/tiny_cpu.yaml
        loop_recipes/tiny_policy/model.safetensors appworld_adapter/worker/synthetic/generate.py
        loop_viewer/static/index.html loop_viewer/static/vendor/uplot.js loop_viewer/static/vendor/htm-preact.js""",
    "torchtune_loop_contrib": "loop_contrib/worlds/configs/worlds/babyai.yaml loop_contrib/code_tool/python_tool.py",
}
for name, needed in NEEDED.items():
    wheel = zipfile.ZipFile(out / f"{name}-{version}-py3-none-any.whl")
    names = set(wheel.namelist())
    lacks = set(needed.split()) - names
    assert not lacks, f"the wheel of {name} lacks {lacks}"
    tests = [each for each in names if "/tests/" in each or each.startswith(("tests/", "recipes/"))]
    assert not tests, f"the wheel of {name} has files that overwrite others: {tests[:3]}"
    metadata = email.message_from_bytes(wheel.read(f"{name}-{version}.dist-info/METADATA"))
    assert metadata["Version"] == version and metadata["License-Expression"] == "Apache-2.0", dict(metadata)
    with tarfile.open(out / f"{name}-{version}.tar.gz") as sdist:
        assert any(each.name.endswith("/pyproject.toml") for each in sdist), "the sdist has no pyproject.toml"
    print(f"{name} {version}: {len(names)} files in the wheel, {metadata['Requires-Python']}")
core = set(zipfile.ZipFile(out / f"torchtune_loop-{version}-py3-none-any.whl").namelist())
assert not any("contrib" in name for name in core), "contrib is a distribution of its own"
END
# Every Python that is named as one that ran: what its parser refuses is found here, what it runs by tests/drills.
for minor in $(grep -o 'Python :: 3\.[0-9]*' pyproject.toml | cut -d. -f2); do
  if ! "python3.$minor" -c "" 2>/dev/null; then echo "python3.$minor is not here: not tried"; continue; fi
  "python3.$minor" -m venv "$folder/python3.$minor"
  "$folder/python3.$minor/bin/pip" install --quiet --no-deps "$out"/*"$versions"*.whl
  packages=$("$folder/python3.$minor/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  (cd "$packages" && "$folder/python3.$minor/bin/python" -m compileall -q loop_* model_families rollout_server agent_environments appworld_adapter)
  echo "python3.$minor: installed from an empty folder, all files compile"
done
ls -sh "$out"
grep -q "^## \[$versions\] - 20" CHANGELOG.md || echo "before the upload: CHANGELOG.md calls $versions unreleased"
grep -q "\bREPOSITORY\b" "$folder/README.md" && echo "before the upload: make release REPOSITORY=ADDRESS, which README.md and CITATION.cff name" || true
