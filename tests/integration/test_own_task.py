"""`loop train FILE.py` from a file of functions to its scores; and how many lines of the project that loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import size
from benchmarks.closure import OWN_TASK, SCORED, Source, ways_in
from loop_formats.run_files import newest_adapter
from loop_formats.run_folder import read_metrics
from loop_plumbing.plug_ins import packages
from loop_recipes.paths import loop_package
from support.waiting import COMMAND_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * COMMAND_S)]
LOADED = size.ROOT / "build/own_task.json"
SMALL = ("max_iterations=1", "collection.tasks_per_iteration=4")
# The tiny policy knows no task; of answers of even and odd length it gives both, so that there is something to learn.
EVEN = (size.ROOT / "benchmarks/task_files/even.py").read_text()


def test_a_file_of_functions_is_trained_and_scored_and_loads_no_more_lines_than_its_cap(tmp_path):
    """``build/own_task.json`` has the modules that any process executed with their lines, without and with scoring."""
    (tmp_path / "even.py").write_text(EVEN)
    noted = tmp_path / "loaded"
    own = {"LOOP_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "LOADED_FILES": str(noted)}
    done = subprocess.run(
        [Path(sys.executable).with_name("loop"), "train", "even.py", "--model", loop_package("tiny_policy"), *SMALL],
        cwd=tmp_path,
        env={**os.environ, **own, "PYTHONPATH": str(size.ROOT / "tests/support/loaded_files")},
        capture_output=True,
        text=True,
        timeout=2 * COMMAND_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    run = tmp_path / "runs/even"
    assert [line["policy_version"] for line in read_metrics(run)] == [1]
    assert newest_adapter(run) == run / "policies/policy-v0001"
    assert (run / "evaluation/report.md").is_file()

    source = Source(size.ROOT)
    modules = {str(file): module for module, file in source.files.items()}
    rows, executed = [], set()
    for way, file in ((OWN_TASK, noted), (SCORED, noted.with_name("loaded.scoring"))):
        executed |= {modules[name] for name in file.read_text().splitlines() if name in modules}
        lines = {module: source.lines(module) for module in sorted(executed)}
        estimated = {module: source.lines(module) for module in source.closure(ways_in(source)[way])}
        rows.append({"way": way, "modules": len(lines), "lines": sum(lines.values()), "lines_of": lines})
        print(f"{way}: {len(lines)} modules, {rows[-1]['lines']:,} lines")
        print(f"  estimated, not executed: { {name: estimated[name] for name in estimated.keys() - lines.keys()} }")
        missed = {name for name in lines.keys() - estimated.keys() if name.partition(".")[0] not in packages()}
        assert not missed, "benchmarks/closure.py does not know that this way in loads them"
    of_each_process = {"loop_recipes.cli", "loop_appworld", "rollout_server.cli", "rollout_server.inference.cpu_lora"}
    assert of_each_process <= rows[0]["lines_of"].keys(), "the command, the trainer, its node and the node's server"
    LOADED.parent.mkdir(exist_ok=True)
    LOADED.write_text(json.dumps(rows, indent=1) + "\n")
    found = {"own_task_loaded": rows[0]["lines"]}
    print(*size.slack(found), sep="\n")
    assert size.risen(found) == []
