import torch

from agent_environments.tools import reward

torch.manual_seed(0)
VECTORS = torch.randint(0, 9, (12, 3))
TASKS = [
    {"id": f"v{i}", "question": f"{i}: sum of {vector.tolist()}?", "vector": vector, "total": vector.sum()}
    for i, vector in enumerate(VECTORS)
]


@reward
def right(answer: str, total) -> torch.Tensor:
    said = float(answer) if answer.strip().lstrip("-").isdigit() else float("inf")
    return (torch.tensor(said) == total).float()
