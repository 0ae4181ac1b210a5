"""tau2-bench's own rewards for scripted agents, run by an interpreter that has the whole package.

    tau2_reference.py DOMAIN URL

The user is the package's, behind the endpoint at URL and asked by litellm. Prints JSON: task id -> the reward of the
official solution, and that of an agent that says one sentence.
"""

import json
import os
import sys
from typing import ClassVar

os.environ["PYTHON_DOTENV_DISABLED"] = "1"  # the package would read a .env of any folder above it
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would ask the network at each import

from loguru import logger
from tau2.agent.llm_agent import LLMAgent
from tau2.data_model.message import AssistantMessage, ToolCall
from tau2.registry import registry
from tau2.run import run_task
from tau2.utils.utils import get_now


class Scripted(LLMAgent):
    turns: ClassVar[list[AssistantMessage]] = []

    def generate_next_message(self, message, state):
        turn = self.turns.pop(0)
        turn.timestamp = get_now()  # by which the package sorts the messages
        return turn, state


def says(text):
    return AssistantMessage(role="assistant", content=text, cost=0.0)


def calls(number, action):
    made = ToolCall(id=f"call_{number}", name=action.name, arguments=action.arguments)
    return AssistantMessage(role="assistant", tool_calls=[made], cost=0.0)


def main():
    domain, url = sys.argv[1:]
    logger.remove()
    registry.register_agent(Scripted, "scripted")
    user = {"user": "user_simulator", "llm_user": "openai/user"}
    user["llm_args_user"] = {"temperature": 0.0, "api_base": url, "api_key": "none"}
    rewards = {}
    for task in registry.get_tasks_loader(domain)(None):
        criteria = task.evaluation_criteria
        gold = [calls(number, action) for number, action in enumerate(criteria.actions or [])]
        told = says(" ".join(["That is all done.", *(criteria.communicate_info or [])]))
        rewards[task.id] = []
        for turns in ([*gold, told], [says("I cannot help you.")]):
            Scripted.turns = turns
            played = run_task(domain=domain, task=task, agent="scripted", **user)
            rewards[task.id].append(played.reward_info.reward)
    print(json.dumps(rewards))


if __name__ == "__main__":
    main()
