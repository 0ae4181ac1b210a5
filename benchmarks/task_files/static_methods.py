from agent_environments.tools import reward, tool


class Tools:
    @tool
    @staticmethod
    def upper(text: str) -> str:
        """Upper case."""
        return text.upper()

    @staticmethod
    @tool(terminal=True)
    def say(text: str) -> str:
        """Say the result."""
        return text

    def reset(self, task): ...


@reward
def right(answer, shout):
    return answer == shout


TASKS = [{"id": f"shout_{n}", "question": f"Shout word{n}.", "shout": f"WORD{n}"} for n in range(10)]
