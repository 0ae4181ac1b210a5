#!/usr/bin/env bash
# One would guess: SummaryWriter(purge_step=n) has every reader of TensorBoard drop the scalars from step n on.
# So it is: EventAccumulator drops only those of the old style (torch's default), none of add_scalar(new_style=True).
# See recipes/loop_recipes/run/tracker_clients.py. tensorboard 2.21.0 and torch 2.13.0, on a CPU; 28 November 2026.
set -euo pipefail
. "$(dirname "$0")/alone.sh"

alone torch==2.13.0 tensorboard==2.21.0 'setuptools<81' << 'END'
import logging, tempfile, time
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
logging.getLogger("tensorboard").setLevel(logging.ERROR)
def read(new_style):
    """Steps that are read of a run that was killed after step 3 and went on at step 2."""
    folder = tempfile.mkdtemp()
    for steps, purge in ((range(4), None), (range(2, 5), 2)):
        writer = SummaryWriter(folder, purge_step=purge, filename_suffix=f".{purge}")
        for step in steps:
            writer.add_scalar("loss", 1.0, step, new_style=new_style)
        writer.close()
        time.sleep(1.1)  # files are read in the order of their names, which have seconds
    events = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return [event.step for event in (events.Tensors if new_style else events.Scalars)("loss")]
seen = {"old style": read(False), "new style": read(True)}
expected = {"old style": [0, 1, 2, 3, 4], "new style": [0, 1, 2, 3, 2, 3, 4]}
END
