#!/usr/bin/env bash
# Drill: wheels, a new environment and an empty folder; the core's alone takes a file of functions from nothing to a
# served policy, whose log-probs are the run's, and with contrib's beside it a world of contrib is played.
#
#     bash tests/drills/wheel.sh            # 15 minutes on two cores, 4 GB in a temporary folder
#     APPWORLD=1 bash tests/drills/wheel.sh # and `tune run loop_appworld` on the synthetic world: 5 minutes more
#
# Nothing of the checkout is on any path after the wheels are built, and the environment has no variable of this shell but
# those of pip. It ends with 0 if every step did.
set -euo pipefail
checkout=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3.11}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
step() { echo "==> $*"; }

step "building and checking sdists and wheels"
PYTHON=$python bash "$checkout/requirements/release.sh" "$folder/dist"
wheel=$(ls "$folder"/dist/torchtune_loop-*.whl)
contrib=$(ls "$folder"/dist/torchtune_loop_contrib-*.whl)

step "installing $(basename "$wheel")[cpu]"
"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
if [ -n "${PIP_FIND_LINKS:-}" ]; then
  "$bin/pip" install --quiet "$wheel[cpu]"
  # PyTorch's CPU index has these for the CPU build of torch. PyPI's are for CUDA and break the import of transformers.
  "$bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
else
  "$bin/pip" install --quiet --extra-index-url "${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}" "$wheel[cpu]"
fi

mkdir "$folder/empty" "$folder/home"
cd "$folder/empty"
run() {
  echo "\$ $*"
  env -i PATH=/usr/bin:/bin HOME="$folder/home" OMP_NUM_THREADS=1 "$bin/$@"
}
model=$(run python -c 'from loop_recipes.paths import loop_package; print(loop_package("tiny_policy"))' | tail -1)
small="max_iterations=2 collection.tasks_per_iteration=4"

step "a game"
run loop --version
run tune ls | grep loop_appworld >listed.txt
run loop init my_game
run loop try my_game.py | tail -2
# The tiny policy knows no game; of answers of even and odd length it gives both, so that there is something to learn.
cat >even.py <<'END'
from agent_environments.tools import reward


@reward
def even(answer: str) -> bool:
    return len(answer) % 2 == 0


TASKS = [{"id": str(n), "question": f"Say something of {n}."} for n in range(20)]
END
run loop train even.py --model "$model" output_dir=runs/game optimizer.lr=0.003 $small
run loop eval runs/game/train.yaml
run loop view runs/game --text >view.txt && head -3 view.txt
run loop view runs/game --export game.html
run loop plot runs/game
run loop export runs/game
run python "$checkout/tests/drills/served.py" runs/game
said=$(run loop check tiny_cpu world=colbench 2>&1 || true)
grep "no world 'colbench'" <<<"$said"  # contrib is not in the core's wheel

step "installing $(basename "$contrib"), and a world of it"
"$bin/pip" install --quiet --no-deps "$contrib"
run loop train tiny_cpu world=colbench model.path="$model" output_dir=runs/colbench $small
run loop view runs/colbench --text >view.txt && head -3 view.txt

if [ -n "${APPWORLD:-}" ]; then
  step "AppWorld's engine, by the commands that the refusals name"
  said=$(run loop check tiny_cpu 2>&1 || true)
  echo "$said" | head -1
  "$python" -m venv .venv-appworld
  .venv-appworld/bin/pip install --quiet "$(run python -c 'from appworld_adapter.making import APPWORLD; print(APPWORLD)' | tail -1)"
  .venv-appworld/bin/appworld install >"$folder/appworld.log"
  eval "$(grep -o '`[^`]*generate.py[^`]*`' <<<"$said" | head -1 | tr -d '`')"
  run tune run loop_appworld --config loop_appworld/tiny_cpu output_dir=runs/world $small
  run tune run eval_appworld --config eval_appworld/tiny_cpu run=runs/world split=dev 'samplings=[{temperature: 1.0, runs: 1}]'
fi
step "done"
