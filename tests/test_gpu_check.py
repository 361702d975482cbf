"""`benchmarks/gpu_check.sh`: what it would run, what it leaves out and why, and the whole of it."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from leangrpo.checks import check
from leangrpo.config import load_config
from leangrpo.plan import measure
from leangrpo.selection import select

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import gpu_budget  # noqa: E402
import gpu_check  # noqa: E402
import gpu_machine  # noqa: E402
import gpu_report  # noqa: E402
import make_models  # noqa: E402

KNOWN = make_models.workloads()
WORKLOADS = list(KNOWN["workloads"])
GIB = 2**30
H100 = {"device": "H100", "tflops": 600.0, "free": 79 * GIB, "torch": "2", "cuda": "12"}


def config_of(name: str) -> Any:
    workload = KNOWN["workloads"][name]
    return load_config(workload["recipe"], [*KNOWN["common"], *workload["settings"]])


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_valid(name: str) -> None:
    """Published steps, one group, bfloat16, and as many steps trained as the budget counts."""
    workload, config = KNOWN["workloads"][name], config_of(name)
    check(config, files=False)
    noise = [1.0] * (config.sampling.steps - 1) + [0.5]
    steps = select(config.selection, noise, seed=config.seed, update=0)
    assert (config.sampling.steps, len(steps.selected)) == (workload["steps"], workload["selected"])
    assert config.model.dtype == "bfloat16" and config.objective.kl == 0
    rollout = config.rollout
    assert (rollout.prompts, rollout.generations, rollout.micro_batch) == (1, 2, 1)
    assert rollout.generations == gpu_budget.GENERATIONS


def test_jobs_name_workloads() -> None:
    stages = {job.split()[0] for job in KNOWN["jobs"]}
    assert stages == {"bench", "verify", "retain", "ledger", "compiled"}
    assert {job.split()[1] for job in KNOWN["jobs"]} == set(WORKLOADS)
    assert len(set(KNOWN["jobs"])) == len(KNOWN["jobs"])


# every kind of training once; `flux1-dev-lora` and the video take as long as all others together
@pytest.mark.parametrize(
    "name",
    [
        "sd35-medium-full",
        *(pytest.param(n, marks=pytest.mark.slow) for n in WORKLOADS if n != "sd35-medium-full"),
    ],
)
def test_costs_are_the_planners(name: str) -> None:
    """To the three decimals they are written with."""
    found, costs = measure(config_of(name)), KNOWN["workloads"][name]["costs"]
    model = KNOWN["models"][KNOWN["workloads"][name]["model"]]
    count = found.count
    assert count.kept_checkpointed is not None
    assert costs["forward"] == pytest.approx(count.forward.flops / 1e12, abs=6e-4)
    assert costs["backward"] == pytest.approx(count.backward.flops / 1e12, abs=6e-4)
    assert costs["kept"] == pytest.approx(count.kept / GIB, abs=6e-4)
    assert costs["kept_checkpointed"] == pytest.approx(count.kept_checkpointed / GIB, abs=6e-4)
    assert costs["trained"] == pytest.approx(found.number / 1e6, abs=0.06)
    # Wan keeps a few of its parameters in float32
    assert costs["bytes"] == round(found.gradient / found.number)
    adapters = found.number if costs["bytes"] == 4 else 0
    assert model["parameters"] == pytest.approx(found.parameters - adapters, rel=1e-3)


@pytest.mark.parametrize("name", list(KNOWN["models"]))
def test_shapes(name: str) -> None:
    """Short: fewer layers and nothing else. The true size is that of the published model."""
    _, true = make_models.denoiser_config(name)
    _, short = make_models.denoiser_config(name, "short")
    changed = {k for k in short if short[k] != true.get(k)}
    assert changed and changed <= {"num_layers", "num_single_layers", "dual_attention_layers"}
    published = make_models.facts()["models"][KNOWN["models"][name]["id"]]["parameters"]
    size = make_models.num_bytes(name)
    # SD3's table of positions is a buffer of 0.23e9 beside its parameters
    assert size == pytest.approx(2 * published, rel=0.12)
    assert make_models.num_bytes(name, "short") < 0.2 * size


def test_update_tflop() -> None:
    """By hand: 2 generations of T = 3 steps, S = 2 trained, f = 1, b = 2."""
    workload = {"steps": 3, "selected": 2, "costs": {"forward": 1.0, "backward": 2.0}}
    count = gpu_budget.update_tflop
    assert count(workload, "native", checkpointing=False) == 2 * (3 + 2 * (1 + 2))
    assert count(workload, "reweight", checkpointing=False) == 2 * (3 + 2 * 2)
    assert count(workload, "retain", checkpointing=True) == 2 * (3 + 2 * (2 + 1))


def test_rounds_shrink_with_the_time_left() -> None:
    workload = KNOWN["workloads"]["flux1-dev-lora"]
    attempt = gpu_budget.Attempt(("native", "reweight"), False)
    facts: dict[str, Any] = {"tflops": 600.0, "size": 24 * 10**9}
    found = [gpu_budget.rounds_for(workload, attempt, s, **facts) for s in (1e4, 230.0, 60.0, 1.0)]
    assert found[0] == 3 and found[-1] == 0 and found == sorted(found, reverse=True)
    one = gpu_budget.seconds(workload, attempt, 1, **facts)
    assert gpu_budget.rounds_for(workload, attempt, one, **facts) == 1
    assert gpu_budget.rounds_for(workload, attempt, one - 0.1, **facts) == 0


def test_what_fits_is_tried() -> None:
    """On 80 GB the graphs of retain fit with checkpointing only; on 24 GB FLUX fits in no way."""
    full = KNOWN["workloads"]["sd35-medium-full"]
    size = 2 * int(KNOWN["models"]["sd35-medium"]["parameters"])
    attempts = gpu_budget.attempts(full, gpu_budget.ALL, free=79 * GIB, size=size)
    assert attempts == [
        gpu_budget.Attempt(("native", "reweight", "streaming"), False),
        gpu_budget.Attempt(("native", "retain", "reweight"), True),
    ]
    flux = KNOWN["workloads"]["flux1-dev-lora"]
    size = 2 * int(KNOWN["models"]["flux1-dev"]["parameters"])
    assert gpu_budget.attempts(flux, gpu_budget.ALL, free=24 * GIB, size=size) == []
    everything = gpu_budget.attempts(flux, gpu_budget.ALL, free=None, size=size)
    assert everything == [gpu_budget.Attempt(gpu_budget.ALL, False)]


def test_retreat_ends() -> None:
    """Whatever runs out of memory is followed by less, and at last by nothing."""
    waiting, seen = [gpu_budget.Attempt(gpu_budget.ALL, False)], 0
    while waiting:
        waiting += gpu_budget.after_memory_ran_out(waiting.pop(0))
        seen += 1
        assert seen < 10
    assert seen > 2


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        (0, "", "ok"),
        (None, "x", "out of time"),
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried\nbye", "out of memory"),
        (-9, "", "out of memory"),
        (2, "Error: No such command 'verify'.", "absent"),
        (1, "ValueError: no", "failed"),
    ],
)
def test_outcomes(code: int | None, output: str, status: str) -> None:
    found, reason = gpu_check.outcome(gpu_check.Ended(code, output, 1.0), 10.0)
    assert found == status and bool(reason) == (status != "ok")


def test_a_limit_of_time_ends_the_process() -> None:
    ended = gpu_check.run([sys.executable, "-c", "import time; time.sleep(60)"], 0.3)
    assert ended.code is None and ended.seconds < 30


def test_room(tmp_path: Path) -> None:
    place, reason = gpu_check.room(1, [tmp_path / "none", tmp_path], None, 0)
    assert place == tmp_path and not reason
    place, reason = gpu_check.room(10**18, [tmp_path], None, 0)
    assert place is None and "free of" in reason
    place, reason = gpu_check.room(10**6, [tmp_path], 10**6, 0)
    assert place is None and "the host has" in reason


def test_host_memory_of_a_container(tmp_path: Path) -> None:
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert gpu_machine.host_free(info, tmp_path) == 65536
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert gpu_machine.host_free(info, tmp_path) == 65536
    (tmp_path / "memory.max").write_text("5000\n")
    assert gpu_machine.host_free(info, tmp_path) == 4000
    assert gpu_machine.host_free(tmp_path / "none") is None


class Fake:
    """Commands that end as they are told to, on a clock of their own."""

    def __init__(self, answers: dict[str, Iterator[gpu_check.Ended]]) -> None:
        self.answers, self.lines, self.now = answers, list[Sequence[str]](), 0.0

    def clock(self) -> float:
        return self.now

    def run(self, command: Sequence[str], limit: float) -> gpu_check.Ended:
        self.lines.append(command)
        kind = "make" if "make_models" in command[1] else command[3]
        ended = next(self.answers.get(kind, iter(())), gpu_check.Ended(0, "", 5.0))
        if kind == "make":
            Path(command[3]).mkdir()
        elif ended.code == 0:
            file = Path(command[command.index("--json") + 1])
            shares = {"native": None, "reweight": 0.97, "retain": 0.8, "streaming": 0.9}
            names = command[command.index("--schedules") + 1].split(",")
            rows = [{"schedule": n, "share_of_limit": shares[n]} for n in names]
            numbers = {"seconds": 1.0, "speedup": 1.0, "speedup_min": 0.9, "speedup_max": 1.1}
            numbers |= {"peak_bytes": GIB, "ledger_bytes": 7}
            file.write_text(json.dumps({"rounds": 3, "rows": [r | numbers for r in rows]}))
        self.now += min(ended.seconds, limit)
        return ended


def make_check(tmp_path: Path, fake: Fake, *, minutes: float = 8, **machine: Any) -> Any:
    return gpu_check.Check(
        {**H100, **machine},
        minutes,
        False,
        [tmp_path],
        tmp_path,
        say=lambda _: None,
        run=fake.run,
        clock=fake.clock,
    )


def test_out_of_memory_is_recorded_and_less_is_tried(tmp_path: Path) -> None:
    full = gpu_check.Ended(1, "CUDA out of memory. Tried to allocate 3 GiB", 5.0)
    fake = Fake({"bench": iter([full])})
    job = make_check(tmp_path, fake, free=500 * GIB)
    job.all(["bench sd35-medium-full"])
    assert [j["status"] for j in job.jobs] == ["out of memory", "ok", "ok"]
    assert [j["checkpointing"] for j in job.jobs] == [False, False, True]
    assert "retain" not in job.jobs[1]["schedules"] and "retain" in job.jobs[2]["schedules"]
    result = job.as_dict()
    assert [b["schedule"] for b in result["broken"]] == ["retain"]  # 0.8 of its limit
    assert not result["failed"]
    gpu_report.write(result, tmp_path / "out")
    with (tmp_path / "out" / "speed.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [r["schedule"] for r in rows] == [*gpu_budget.LEAN, "native", "retain", "reweight"]
    assert "broke a bound" in (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "gpu_check.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_budget_is_kept(tmp_path: Path) -> None:
    """Every command takes as long as it may: none begins after the end, all are recorded."""
    forever = gpu_check.Ended(None, "", math.inf)
    fake = Fake({kind: iter([forever] * 99) for kind in ("bench", "verify")})
    job = make_check(tmp_path, fake)
    job.all(KNOWN["jobs"])
    assert fake.now <= 8 * 60
    wanted = {j for j in KNOWN["jobs"] if not j.startswith("retain ")}
    assert {f"{j['stage']} {j['workload']}" for j in job.jobs} >= wanted
    assert {j["status"] for j in job.jobs} == {"out of time"}
    assert not job.as_dict()["failed"]
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]  # no weights are left behind


def test_retain_waits_for_the_others(tmp_path: Path) -> None:
    """On 80 GB it needs checkpointing, so that it comes last; elsewhere not."""
    jobs = ["bench sd35-medium-full", "bench wan21-1.3b-full", "retain sd35-medium-full"]
    job = make_check(tmp_path, Fake({}))
    job.all(jobs)
    found = [(j["workload"], "retain" in j["schedules"], j["checkpointing"]) for j in job.jobs]
    assert found == [
        ("sd35-medium-full", False, False),
        ("wan21-1.3b-full", False, False),
        ("sd35-medium-full", True, True),
    ]
    job = make_check(tmp_path, Fake({}), free=500 * GIB)
    job.all(jobs)
    assert len(job.jobs) == 2 and all("retain" in j["schedules"] for j in job.jobs)


def test_models_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    fake = Fake({})
    job = make_check(tmp_path, fake, free=4 * GIB)
    job.all(["bench flux1-dev-lora"])
    assert job.jobs[0]["status"] == "out of memory" and "GiB are free" in job.jobs[0]["reason"]
    assert not fake.lines
    job = make_check(tmp_path, fake, host_free=GIB)
    job.all(["bench flux1-dev-lora"])
    assert "the host has" in job.jobs[0]["reason"] and not fake.lines


@pytest.mark.parametrize(("tflops", "name"), [(600.0, "H100"), (240.0, "A100")])
def test_benchmarks_take_less_than_eight_minutes(tflops: float, name: str) -> None:
    """The arithmetic of docs/gpus.md: the four benchmarks and their models, at a round each."""
    total, drawn = 0.0, set()
    for job in KNOWN["jobs"][:4]:
        workload = KNOWN["workloads"][job.split()[1]]
        size = 2 * int(KNOWN["models"][workload["model"]]["parameters"])
        if workload["model"] not in drawn:
            drawn.add(workload["model"])
            total += gpu_budget.START + size / gpu_budget.WRITTEN
        attempt, *_ = gpu_budget.attempts(workload, gpu_budget.ALL, free=79 * GIB, size=size)
        total += gpu_budget.seconds(workload, attempt, 1, tflops=tflops, size=size)
    assert total < 480, name


@pytest.mark.slow
def test_everything_on_narrow_models(tmp_path: Path) -> None:
    """The script itself, on the workload that has all four stages."""
    out = tmp_path / "out"
    script = [str(BENCHMARKS / "gpu_check.sh"), "--tiny", "--minutes", "15"]
    script += ["--only", "sd35-medium-lora", "--out", str(out), "--scratch", str(tmp_path)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=1000, check=False)
    result = json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [j["stage"] for j in result["jobs"]] == ["bench", "verify", "ledger", "compiled"]
    ran = {j["stage"]: j["status"] for j in result["jobs"]}
    assert ran["verify"] in ("ok", "absent")
    assert {ran[stage] for stage in ("bench", "ledger", "compiled")} == {"ok"}, result
    rows = result["jobs"][0]["result"]["rows"]
    assert [row["schedule"] for row in rows] == list(gpu_budget.ALL)
    assert (out / "gpu_check.svg").exists() and (out / "speed.csv").exists()
    assert list(tmp_path.iterdir()) == [out]
