from agent_environments.tools import reward, tool


class House:
    log = []

    def __init__(self):
        self.rooms = {}

    def reset(self, task):
        self.rooms = dict(task["rooms"])
        return {"lights": self.rooms}

    @tool
    def switch(self, room: str) -> dict:
        """Press the switch of a room."""
        self.log.append(room)
        self.rooms[room] = not self.rooms[room]
        return self.rooms


@reward
def all_off(instance):
    return not any(instance.rooms.values()) and len(instance.log) < 3


TASKS = [
    {"id": f"house_{n}", "question": f"House {n}: put out all lights.", "rooms": {"hall": n % 2 == 0, "bath": n % 2 == 1}}
    for n in range(12)
]


def solve(task):
    return [{"switch": {"room": room}} for room, on in task["rooms"].items() if on]
