"""Plans of a job, its needs and whether it fits: GPUs, memory, time, disk; `loop check` prints them."""
