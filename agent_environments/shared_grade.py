"""Datasets whose tests run where the agent worked: their scores say so, and nothing is trained on them."""

SHARED_GRADE = "graded where the agent worked"
"""Part of a dataset's name, which stands beside every score, where an agent can forge its own reward."""


def refuse_shared_grade(dataset: str) -> None:
    """Raise ValueError if the agents of this dataset can forge their own rewards."""
    if SHARED_GRADE in dataset:
        raise ValueError(f"{dataset}: an agent could forge its own reward, so it is for `loop eval` alone")
