import uuid

from agent_environments.tools import reward

TASKS = tuple(
    {"id": uuid.uuid5(uuid.NAMESPACE_URL, f"task {n}"), "question": f"Say {n} in binary.", "binary": bin(n)[2:], "group": n // 4}
    for n in range(32)
)


@reward
def right(answer, binary):
    return answer.strip() == binary
