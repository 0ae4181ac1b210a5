import pandas as pd

from agent_environments.tools import reward

frame = pd.DataFrame({"city": ["Rome", "Oslo", "Lima", "Cairo"], "country": ["Italy", "Norway", "Peru", "Egypt"]})
frame["question"] = "Where is " + frame["city"] + "?"
TASKS = frame.reset_index().rename(columns={"index": "id"}).to_dict("records")


@reward
def right(answer: str, country: str) -> float:
    return float(country in answer)
