"""The memory that a machine's host has, by its files, and jobs that need more of it."""

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.plan import host_memory, job_memory
from loop_recipes.plan.host_memory import available, check_host_memory
from loop_recipes.plan.memory_plan import plan_host, plan_rank
from loop_recipes.plan.report import Problem
from model_families.base_model import BaseModel
from support.families import PUBLISHED, PUBLISHED_GENERAL, write_config, write_headers

GIB = 2**30
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Makes the host one of 100 GiB, in these cgroups: (version, folder) to limit, use and what of it are files."""

    def made(own, groups):
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: 1\nMemAvailable:   {100 * 2**20} kB\n")
        if own is not None:
            (proc / "self/cgroup").write_text(own)
        for (version, folder), values in groups.items():
            place = cgroups / ("memory" if version == 1 else "") / folder
            place.mkdir(parents=True, exist_ok=True)
            limit, used, files = values
            names = V1 if version == 1 else V2
            (place / names[0]).write_text(f"{limit if limit == 'max' else int(limit * GIB)}\n")
            (place / names[1]).write_text(f"{used * GIB}\n")
            (place / "memory.stat").write_text(f"anon 5\n{names[2]} {files * GIB}\n")
        monkeypatch.setattr(host_memory, "PROC", proc)
        monkeypatch.setattr(host_memory, "CGROUPS", cgroups)

    return made


HOSTS = {
    "no cgroup": (None, {}, 100),
    "no limit": ("0::/a/b\n", {(2, "a/b"): ("max", 5, 0)}, 100),
    "a limit": ("0::/a/b\n", {(2, "a/b"): (30, 5, 0)}, 25),
    "files are dropped": ("0::/a/b\n", {(2, "a/b"): (30, 25, 20)}, 25),
    "of Slurm, above": ("0::/job/step/task\n", {(2, "job/step/task"): ("max", 1, 0), (2, "job"): (16, 1, 0)}, 15),
    "the least counts": ("0::/a/b\n", {(2, "a"): (20, 1, 0), (2, "a/b"): (50, 1, 0)}, 19),
    "more than there is": ("0::/a\n", {(2, "a"): (500, 1, 0)}, 100),
    "in a container": ("0::/\n", {(2, ""): (12, 2, 0)}, 10),
    "a path outside of the container": ("0::/../../a\n", {(2, ""): (12, 2, 0)}, 10),
    "version 1": ("5:cpu:/x\n4:memory:/a\n0::/\n", {(1, "a"): (8, 3, 1)}, 6),
    "version 1, in a container": ("4:memory,blkio:/docker/abc\n", {(1, ""): (8, 3, 0)}, 5),
    "another's": ("4:cpu:/a\n0::/\n", {(1, "a"): (8, 3, 0), (2, "b"): (8, 3, 0)}, 100),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_is_available_is_what_the_system_and_each_limit_leave(host, name):
    own, groups, gib = HOSTS[name]
    host(own, groups)
    assert available().gib == pytest.approx(gib)


JOBS = {  # config, words, model, GiB that it needs
    "in turns": ("qwen3_4b_24gb", (), PUBLISHED["Qwen3-4B-Instruct-2507"], 16.5),
    "offloading": ("qwen3_4b_24gb", ("node.servers.share=null",), PUBLISHED["Qwen3-4B-Instruct-2507"], 1.4),
    "read by transformers": ("gpt_oss_20b", (), PUBLISHED_GENERAL["gpt-oss-20b"], 38.96),
    "in turns and read": ("qwen3_5_4b_one_gpu", (), PUBLISHED_GENERAL["Qwen3.5-4B"], 15.8),
}


@pytest.mark.fault("a job whose weights do not fit the host's memory beside each other is killed at its first turn")
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("fits", [True, False])
def test_a_job_that_needs_more_is_refused_in_a_line(host, tmp_path, monkeypatch, job, fits):
    config, words, model, need = JOBS[job]
    host("0::/a\n", {(2, "a"): (need * (1.1 if fits else 0.9) + 3, 3, 0)})
    folder = write_headers(write_config(tmp_path, model))
    conf, shape = read_config(compose(config, [f"model.path={folder}", *words]), LoopConfig), BaseModel.read(folder)
    parts = plan_host(shape, conf.node, plan_rank(conf, shape, 1, 0.0), 1)
    told = {}
    for gpus in (0, 1):
        monkeypatch.setattr(job_memory.torch.cuda, "device_count", lambda: gpus)  # noqa: B023 - asked at once
        told[gpus] = [each.text for each in job_memory._host(parts) if isinstance(each, Problem)]
    assert told[0] == [], "it is planned here for another machine"
    if fits:
        check_host_memory(conf)
        assert told[1] == []
        return
    line = (
        rf"^host's memory: the job needs about {need:.1f} GiB: \d.*; the limit in .*/a/memory.max leaves \d+\.\d GiB: "
    )
    with pytest.raises(ConfigError, match=line) as refused:
        check_host_memory(conf)
    assert told[1] == [str(refused.value)]
