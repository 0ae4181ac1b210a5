"""benchmarks/gpu_day.sh with programs in place of the GPU and of the interpreter of the GPU's environment."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_day.sh"
PYTHON = """#!/bin/sh
[ "$1" = - ] && exec {python} "$@"
echo "$*" >>{asked}
case "$*" in *update*) exec sleep 600;; *exactness*) exit 3;; esac
"""


@pytest.fixture
def run(tmp_path):
    asked = tmp_path / "asked"
    programs = {
        "bin/nvidia-smi": "#!/bin/sh\necho 'A Fine GPU'\n",
        "venv/bin/python": PYTHON.format(python=sys.executable, asked=asked),
        "bin/timeout": '#!/bin/sh\nshift 3\ncase "$*" in *update*) exit 124;; esac\nexec "$@"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*words, **environment):
        asked.write_text("")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(SCRIPT), *words],
            env=os.environ | {"PATH": path, "VENV": str(tmp_path / "venv")} | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done, asked.read_text().splitlines()

    return run


def test_the_limits_of_all_steps_are_thirteen_minutes_at_most(run):
    done, asked = run("--dry")
    assert done.returncode == 0
    limits = [int(limit) for limit in re.findall(r"(?m)^ *(\d+) s  ", done.stdout)]
    assert done.stdout.splitlines()[-1] == f"{sum(limits)} s of 780"
    assert not asked


def test_each_step_leaves_rows_and_the_same_command_goes_on_with_what_is_missing(run, tmp_path):
    done, asked = run(str(tmp_path / "results"))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "results/gpu_day.json").read_text())
    assert {row["metric"] for row in rows} == {"exit status", "seconds"}
    assert all(row["case"].endswith(", A Fine GPU") for row in rows)
    status = [row["value"] for row in rows if row["metric"] == "exit status"]
    assert sorted(status) == [*[0] * (len(status) - 2), 3, 124]
    _, again = run(str(tmp_path / "results"))
    assert len(asked) == len(status) - 1  # the one that its limit cut short never began here
    assert [line for line in again if "exactness" not in line] == []
    assert len(json.loads((tmp_path / "results/gpu_day.json").read_text())) == len(rows)


def test_without_a_gpu_or_an_environment_one_line_says_so(run, tmp_path):
    done, _ = run(VENV=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert "holds no bin/python" in done.stderr
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    done, asked = run(VENV=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert "nvidia-smi finds no GPU" in done.stderr
    assert not asked
