"""Hidden information of made-up tasks, for critics."""

from agent_environments.protocol import UnknownTask


class MadeUpSecrets:
    """Knows every task but those called unknown; a component of the configs in tests."""

    def hidden_information(self, task_id: str) -> str:
        if "unknown" in task_id:
            raise UnknownTask(f"nothing is known of {task_id}")
        return f"the answer of {task_id} is {sum(map(ord, task_id))}"


def breaks(task_id: str) -> str:
    """A file of a user's own that is wrong."""
    return {}["x"]
