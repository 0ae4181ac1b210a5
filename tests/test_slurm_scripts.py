"""The deadlines of the sbatch scripts fit together."""

import re
from pathlib import Path

SLURM = Path(__file__).parents[1] / "slurm"


def test_the_warning_comes_before_the_time_that_saving_may_take():
    warned = int(re.search(r"--signal=B:USR1@(\d+)", (SLURM / "train_loop.sbatch").read_text())[1])
    saving = int(re.search(r"LOOP_SAVE_TIMEOUT:=(\d+)", (SLURM / "site.sh").read_text())[1])
    assert warned >= saving + 120, "stopping the steps takes up to 80 s each"
