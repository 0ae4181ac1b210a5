"""tau2-bench on a telecom ticket, run by an interpreter that has it: its own agent, orchestrator and grade.

    tau2_agent.py actions NUMBER      the official solution as JSON, a call each
    tau2_agent.py play NUMBER         the agent LLMSoloAgent solves the ticket; writes {"reward": ...} to reward.json

Nothing here knows of the endpoint: litellm reads ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
"""

import json
import os
import sys
from pathlib import Path

os.environ["PYTHON_DOTENV_DISABLED"] = "1"  # the package would read a .env of any folder above it

from tau2.run import get_tasks, run_task


def main() -> None:
    what, number = sys.argv[1:]
    task = get_tasks("telecom")[int(number)]
    if what == "actions":
        actions = task.evaluation_criteria.actions
        print(json.dumps([{"name": action.name, "arguments": action.arguments} for action in actions]))
        return
    agent = {"agent": "llm_agent_solo", "llm_agent": "openai/policy", "llm_args_agent": {}}
    played = run_task(domain="telecom", task=task, user="dummy_user", llm_args_user={}, **agent)
    Path("reward.json").write_text(json.dumps({"reward": played.reward_info.reward}))


if __name__ == "__main__":
    main()
