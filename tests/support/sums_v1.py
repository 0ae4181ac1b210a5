"""A taskset of verifiers 0.4, as its own template writes one: sums, two rewards and a metric."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.branches[-1].messages[-1].content)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content) < 40)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.branches[-1].messages[-1].content))


class SumsConfig(vf.TasksetConfig):
    split: str = "train"
    num_tasks: int = 8


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        first = 1 if self.config.split == "train" else 100
        for n in range(first, first + self.config.num_tasks):
            data = SumData(id=f"{self.config.split}-{n}", prompt=f"What is {n} plus 1?", answer=str(n + 1))
            yield SumTask(data, self.config.task)


__all__ = ["SumsTaskset"]
