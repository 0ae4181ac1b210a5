"""Serve a run's policy by the line that ``loop export`` prints, and compare log-probs with the learner's.

    python served.py RUN

Needs an installed torchtune-loop with vLLM, and nothing of the checkout. Ends with 1 if any of the tokens differs by a
thousandth of a nat, or the adapter changes none by a tenth.
"""

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from loop_formats.run_files import newest_adapter
from loop_recipes.export.comparison import LogprobDifference, sampled_logprobs, stored_samples
from loop_recipes.export.policy import config_of_run
from rollout_server.inference.command import SERVER_MODULE
from rollout_server.inference.server import free_port

DEADLINE_S = 600


def answer(url, **body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        return json.load(response)


def wait(process, url):
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(1)
    raise SystemExit(f"{url} did not answer")


run = Path(sys.argv[1])
export = [Path(sys.executable).with_name("loop"), "export", run, "to=served_policy"]
printed = subprocess.run(export, stdout=subprocess.PIPE, text=True, check=True).stdout
model, *words = shlex.split(re.search(r"vllm serve (.*)", printed)[1])
port = free_port()
words += ["--dtype", "float32", "--port", str(port), "--kv-cache-memory-bytes", "500000000"]
with open("served.log", "wb") as log:
    server = subprocess.Popen([sys.executable, "-m", SERVER_MODULE, "--model", model, *words], stdout=log, stderr=log)
try:
    url = f"http://127.0.0.1:{port}"
    wait(server, f"{url}/health")
    name = next(word for word in words if word.startswith(f"{run.name}-policy")).partition("=")[0]
    samples = stored_samples(run, 16, 1024)
    policy, base = sampled_logprobs(config_of_run(run)[1], samples, newest_adapter(run))
    served = []
    for sample in samples:
        ids = sample.token_ids.tolist()
        scored = answer(f"{url}/v1/completions", model=name, prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=0)
        each = scored["choices"][0]["prompt_logprobs"]
        served += [each[place][str(ids[place])]["logprob"] for place in range(len(ids)) if bool(sample.mask[place])]
finally:
    server.terminate()
    server.wait(DEADLINE_S)
apart, changed = LogprobDifference.between(policy.new_tensor(served), policy), LogprobDifference.between(policy, base)
print(f"{len(served)} tokens: the served policy is {apart} from the run's, and the run's {changed} from its base")
sys.exit(not (apart.most < 1e-3 and changed.most > 0.1))
