"""Several ranks: started with --nproc or torchrun, killed, interrupted, resumed on other numbers.

A run of two ranks that nothing disturbs is the measure: resumed on two it must come out bitwise
equal, on one or four within rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from test_cli import complaint, leangrpo
from test_train import SMALL, evaluations, lines, num_lines, sha, wait_for
from torch import Tensor

from leangrpo.checkpoint import load_weights, newest
from leangrpo.config import load_config
from leangrpo.errors import LeanError
from leangrpo.launch import (
    FOLLOWED,
    because_of_another,
    check_for,
    complain,
    first_failure,
    resume_command,
)
from leangrpo.parallel import leave
from leangrpo.setup import make_policy
from leangrpo.train import train

HERE = Path(__file__).parent
UPDATES = 4
CALLS_PER_UPDATE = 2  # of the reward on one of two ranks: two prompts, a generation of each

# -- a reward that disturbs its rank, as "WHAT:RANK:CALL" in the environment says ------------------

CALLS = 0


def deadly(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    global CALLS
    CALLS += 1
    what, _, when = os.environ.get("LEANGRPO_TEST", "").partition(":")
    if when == f"{os.environ.get('RANK')}:{CALLS}":
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "raise":
            raise RuntimeError("no disk left")
        if what == "break":
            from leangrpo import train

            train.step = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
    time.sleep(float(os.environ.get("LEANGRPO_TEST_SLEEP", 0)))
    flat = images.flatten(1).double()
    return (flat * torch.linspace(0, 1, flat.shape[1], dtype=torch.float64)).mean(dim=1)


def in_update(number: int) -> int:
    """A call of the reward in the middle of this update (1-based)."""
    return (number - 1) * CALLS_PER_UPDATE + 1


# -- starting --------------------------------------------------------------------------------------


class Ranks:
    """Commands that start ranks, in a folder with a tiny Stable Diffusion 3 and its prompts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        tiny.save(tiny.tiny_sd3(), root / "sd3")
        (root / "prompts.txt").write_text("a cat\na dog\na cup\na car\n", encoding="utf-8")
        self.settings = [
            *SMALL,
            "model.pipeline=sd3",
            "sampling={height: 16, width: 16, call: {max_sequence_length: 16}}",
            "prompts={train: prompts.txt, heldout: prompts.txt}",
            "evaluation.every=2",
            "rewards=[{name: 'test_launch:deadly'}]",
            "optimizer.lr=1e-3",
            f"updates={UPDATES}",
        ]

    def start(
        self, launcher: list[str], *words: object, disturb: str = "", sleep: float = 0
    ) -> Any:
        """Start `leangrpo WORDS`; its standard error goes into its standard output."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "LEANGRPO_TEST": disturb,
            "LEANGRPO_TEST_SLEEP": str(sleep),
        }
        return subprocess.Popen(
            [sys.executable, *launcher, "-m", "leangrpo", *map(str, words)],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a process group of its own, as a shell gives it
        )

    def run(
        self, launcher: list[str], *words: object, disturb: str = "", code: int = 0
    ) -> tuple[str, float]:
        """Wait for the command, which must end with `code`; its output and the seconds it took."""
        began = time.monotonic()
        process = self.start(launcher, *words, disturb=disturb)
        try:
            out, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == code, out
        return out, time.monotonic() - began

    def copy(self, name: str, to: str) -> Path:
        return Path(shutil.copytree(self.root / name, self.root / to))


def torchrun(ranks: int) -> list[str]:
    local = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *local]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> tuple[Path, str]:
    """A run on two ranks that nothing disturbed, and what it printed."""
    words = ["train", *ranks.settings, "run.dir=whole", "--json", "whole.json"]
    out, _ = ranks.run([], *words, "--nproc", 2)
    return ranks.root / "whole", out


@pytest.fixture(scope="module")
def killed(ranks: Ranks) -> tuple[Path, str, float]:
    """The same, but rank 1 is killed in the middle of the third update."""
    out, seconds = ranks.run(
        [], "train", *ranks.settings, "run.dir=killed", "--nproc", 2,
        disturb=f"kill:1:{in_update(3)}", code=1,
    )  # fmt: skip
    return ranks.root / "killed", out, seconds


def weights(run: Path) -> Tensor:
    """All trained weights of a run's newest checkpoint, whoever wrote it."""
    found, complaints = newest(run / "checkpoints")
    assert found is not None and complaints == []
    config = load_config(run / "config.yaml", [f"model.pipeline={run.parent / 'sd3'}"])
    policy = make_policy(config, torch.device("cpu"))
    load_weights(policy, found.folder)
    return torch.cat([p.detach().flatten().double() for p in policy.parameters])


def same_run(one: Path, other: Path) -> None:
    assert lines(one) == lines(other)
    assert evaluations(one) == evaluations(other)
    assert sha(one) == sha(other)


# -- a run of two ranks ----------------------------------------------------------------------------


def test_only_the_first_rank_speaks(whole: tuple[Path, str]) -> None:
    run, out = whole
    shown = [line for line in out.splitlines() if line.startswith("update ")]
    assert [line.split()[1] for line in shown] == [f"{n}/{UPDATES}" for n in range(1, UPDATES + 1)]
    assert out.count("report: ") == 1
    for noise in ("Traceback", "Gloo", "OMP_NUM_THREADS", "closing signal"):
        assert noise not in out
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (summary["stopped"], summary["ranks"]) == ("finished", 2)
    assert json.loads((run.parent / "whole.json").read_text(encoding="utf-8")) == summary


def test_a_killed_rank_ends_the_job(killed: tuple[Path, str, float]) -> None:
    run, out, seconds = killed
    assert seconds < 30 + 15  # those of loading
    *_, before, last = out.splitlines()
    assert before == "rank 0: stopped, because another rank did"
    assert last == (
        "error: rank 1 was killed by SIGKILL, and the others stopped. 2 updates are saved; "
        "go on with: leangrpo train killed --resume --nproc 2"
    )
    assert "Traceback" not in out
    assert not (run / "summary.json").exists()


@pytest.mark.slow
def test_resumed_on_as_many(
    ranks: Ranks, killed: tuple[Path, str, float], whole: tuple[Path, str]
) -> None:
    run = ranks.copy("killed", "two")
    out, _ = ranks.run([], "train", "two", "--resume", "--nproc", 2)
    assert "going on after update 2" in out
    same_run(run, whole[0])


def test_resumed_on_one(
    ranks: Ranks,
    killed: tuple[Path, str, float],
    whole: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ranks.copy("killed", "one")
    monkeypatch.chdir(ranks.root)
    train(load_config("one/config.yaml", ["run.dir=one"]), resume=True, quiet=True)
    assert_close(run, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["parallel.replicate=1", "parallel={shard: 2, replicate: 2}"])
def test_resumed_on_four(
    setting: str, ranks: Ranks, killed: tuple[Path, str, float], whole: tuple[Path, str]
) -> None:
    run = ranks.copy("killed", f"four-{len(setting)}")
    ranks.run(torchrun(4), "train", run.name, setting, "--resume")
    assert_close(run, whole[0])


def assert_close(run: Path, other: Path) -> None:
    mine, theirs = weights(run), weights(other)
    assert float((mine - theirs).norm() / theirs.norm()) < 5e-6
    assert len(lines(run)) == UPDATES
    for one, two in zip(lines(run), lines(other), strict=True):
        assert one["reward_mean"] == pytest.approx(two["reward_mean"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)


# -- failing ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_rank_under_torchrun(ranks: Ranks) -> None:
    out, seconds = ranks.run(
        torchrun(2), "train", *ranks.settings, "run.dir=torchrun",
        disturb=f"kill:1:{in_update(2)}", code=1,
    )  # fmt: skip
    assert seconds < 30 + 15
    assert "rank 0: stopped, because another rank did\n" in out
    assert "1 updates are saved in torchrun" in out
    assert "go on with: torchrun --nproc-per-node 2 -m leangrpo train torchrun --resume" in out
    assert "RuntimeError" not in out


@pytest.mark.slow
def test_a_mistake_of_one_rank(ranks: Ranks) -> None:
    out, _ = ranks.run(
        [], "train", *ranks.settings, "run.dir=mistake", "--nproc", 2,
        disturb=f"raise:1:{in_update(1)}", code=2,
    )  # fmt: skip
    said = [line for line in out.splitlines() if line.startswith(("error:", "rank "))]
    assert said == [
        "error: rank 1: reward `test_launch:deadly` raised RuntimeError: no disk left "
        "(test_launch.py, line 59)",
        "rank 0: stopped, because another rank did",
        "error: rank 1 failed first, with exit code 2; what it said is above. 0 updates are saved; "
        "go on with: leangrpo train mistake --resume --nproc 2",
    ]
    assert "Traceback" not in out


@pytest.mark.slow
def test_a_bug_on_one_rank(ranks: Ranks) -> None:
    """Its traceback is the only one, and comes before what the other rank has to say."""
    out, _ = ranks.run(
        [], "train", *ranks.settings, "run.dir=bug", "--nproc", 2,
        disturb=f"break:0:{in_update(2)}", code=1,
    )  # fmt: skip
    assert out.count("Traceback") == 1
    assert "error: rank 0: ZeroDivisionError: division by zero\nTraceback" in out
    assert "typer" not in out
    assert out.index("Traceback") < out.index("rank 1: stopped, because another rank did")
    assert "error: rank 0 failed first, with exit code 1; what it said is above." in out


# -- interrupted -----------------------------------------------------------------------------------


def test_interrupt(ranks: Ranks) -> None:
    out, run = interrupted(ranks, "interrupted", times=1)
    assert "Finishing this update, then saving. Once more to stop at once." in out
    assert "go on with: leangrpo train interrupted --resume --nproc 2" in out
    assert "Traceback" not in out and "error" not in out
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    found, _ = newest(run / "checkpoints")
    assert found is not None
    assert summary["stopped"] == "interrupted"
    assert found.update == summary["updates"] == num_lines(run) < UPDATES + 1000


@pytest.mark.slow
def test_interrupted_twice(ranks: Ranks) -> None:
    out, run = interrupted(ranks, "twice", times=2)
    assert not (run / "summary.json").exists()
    assert "go on with: leangrpo train twice --resume --nproc 2" in out
    assert "Traceback" not in out


def interrupted(ranks: Ranks, name: str, times: int) -> tuple[str, Path]:
    """A run interrupted by Ctrl-C in its second update; what it printed, and its folder."""
    words = ["train", *ranks.settings, f"run.dir={name}", "updates=1000", "--nproc", 2]
    process = ranks.start([], *words, sleep=0.3 if times == 1 else 4)
    try:
        wait_for(lambda: num_lines(ranks.root / name) >= 1)
        for _ in range(times):
            time.sleep(2.5 if times > 1 else 0)  # sooner than that it would be the same request
            os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, out
    return out, ranks.root / name


# -- without starting anything ---------------------------------------------------------------------


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting ranks fails the test."""
    monkeypatch.setattr("leangrpo.cli_options.launch", lambda *_: pytest.fail("ranks were started"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nproc", 2, "parallel={shard: 3, replicate: 1}"], "shard x replicate is 3 x 1"),
        (["--nproc", 4, "parallel={shard: 2, replicate: 1}"], "2 x 1, and there are 4 ranks"),
        (["--nproc", 0], "`--nproc` is 0: it must be at least 1."),
        (["--nproc", 2, "parallel.sync=step", "schedule=reweight"], "before ranks are added"),
    ],
)
@pytest.mark.usefixtures("no_ranks")
def test_refused_before_a_rank_is_started(words: list[object], said: str) -> None:
    assert said in complaint(leangrpo("train", *words))
    assert said in complaint(leangrpo("bench", *words))
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.usefixtures("no_ranks")
def test_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    said = complaint(leangrpo("train", "--nproc", 2))
    assert said == "`--nproc` is 2: this is a rank already. Leave it out under torchrun."


def test_settings_fit_the_ranks() -> None:
    config = load_config("embedded", ["parallel={shard: 2, replicate: 2}"])
    check_for(config, 4)
    with pytest.raises(LeanError, match="there are 2 ranks"):
        check_for(config, 2)


def test_what_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("leangrpo.cli_options.launch", lambda *call: calls.append(call) or 0)
    monkeypatch.chdir(tmp_path)
    assert leangrpo("train", "updates=3", "-q", "--json", "x.json", "--nproc", 2).code == 0
    assert leangrpo("bench", "--rounds", 2, "--nproc", 3, "seed=1").code == 0
    (words, nproc, folder), bench = calls
    assert words == [
        "train", "--quiet", "--json", "x.json", "--", "updates=3", f'run.dir="{folder}"'
    ]  # fmt: skip
    assert nproc == 2 and folder.parent == Path("runs")
    assert bench == (["bench", "--rounds=2", "--", "seed=1"], 3, None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("[pair.cc:544] Connection closed by peer [127.0.0.1]:9"), "another rank did"),
        (RuntimeError("recv: Connection reset by peer"), "another rank did"),
        (torch.distributed.DistBackendError("remote process exited"), "another rank did"),
        (RuntimeError("Timed out waiting 600000ms for recv"), "another rank did not answer"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), None),
        (RuntimeError("my model: operation aborted"), None),
        (torch.distributed.DistBackendError("Duplicate GPU detected : rank 0"), None),
        (ConnectionResetError("reset by peer"), None),  # a reward's own server, say
        (LeanError("timeout"), None),
    ],
)
def test_why_a_rank_stops(error: Exception, said: str | None) -> None:
    found = because_of_another(error)
    assert found is None if said is None else str(found).startswith(said)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: (FOLLOWED, 5), 1: (-signal.SIGKILL, 6)}, 1),
        ({0: (-signal.SIGTERM, 5), 1: (FOLLOWED, 5), 2: (1, 9)}, 2),
        ({0: (2, 5), 1: (2, 5)}, 0),
        ({0: (1, 5), 1: (-signal.SIGSEGV, 5)}, 1),
        ({0: (1, 4), 1: (-signal.SIGABRT, 5)}, 0),
        ({0: (FOLLOWED, 6), 1: (FOLLOWED, 5)}, 1),
    ],
)
def test_who_failed_first(ends: dict[int, tuple[int, int]], first: int) -> None:
    failures = {r: SimpleNamespace(exitcode=c, timestamp=t) for r, (c, t) in ends.items()}
    assert first_failure(failures) == (first, failures[first])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "leangrpo train 'my run' --resume"),
        ({"LEANGRPO_NPROC": "2"}, "leangrpo train 'my run' --resume --nproc 2"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            "torchrun --nproc-per-node 4 -m leangrpo train 'my run' --resume",
        ),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            "torchrun (as before) -m leangrpo train 'my run' --resume",
        ),
    ],
)
def test_how_to_go_on(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resume_command(Path("my run")) == expected


def test_alone_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        complain(ZeroDivisionError())
    assert complain(LeanError("no such file")) == 2
    assert capsys.readouterr().err == "error: no such file\n"


def test_a_rank_that_waits_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        leangrpo("--version")
        assert signal.getsignal(signal.SIGINT) == before
        monkeypatch.setenv("WORLD_SIZE", "2")
        leangrpo("--version")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_leave_without_ranks() -> None:
    leave()


def test_the_slurm_script_parses() -> None:
    script = HERE.parent / "examples" / "slurm.sh"
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    text = script.read_text(encoding="utf-8")
    for needed in ("#SBATCH --nodes", "srun", "torchrun", "--rdzv-endpoint", "-m leangrpo train"):
        assert needed in text
