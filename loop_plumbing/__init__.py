"""What every package needs and no subject owns: processes and their owners, an HTTP server, retries, deadlines."""

import os

# Threads of OpenMP that spin while they wait for each other take the processors from whom they wait for: beside other
# work, ten times as long. OpenMP reads this when torch is loaded, so it is set here, before any part of ours loads it,
# for this process and all below it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
