"""What a job needs and whether it fits: GPUs, memory, time, disk; `loop check` prints it."""
