"""`leangrpo audit run`: the program's own output and exit code, and a report whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import complaint, leangrpo

from leangrpo.audit_run import run_audited

PROGRAM = """
import os, sys, time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(80, 80)
    def forward(self, x, timestep):
        return self.layer(x) + timestep

def update(net, optimizer):
    x, stored = torch.randn(2, 80), []
    with torch.no_grad():
        for t in (3.0, 2.0, 1.0):
            stored.append((x, t))
            x = x + 0.1 * net(x, t) + 0.1 * torch.randn_like(x)
    for x, t in stored:
        net(x, t).square().mean().backward()
    optimizer.step()

if __name__ == "__main__":
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        update(net, optimizer)
    print("arguments", sys.argv[1:], flush=True)
    ending = sys.argv[-1]
    if ending == "raise":
        raise KeyError("mine")
    if ending == "os":
        os._exit(5)
    if ending == "hang":
        time.sleep(60)
    if ending == "text":
        sys.exit("words")
    sys.exit(int(ending))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "trainer_of_mine.py"
    file.write_text(PROGRAM, encoding="utf-8")
    return file


def found(file: Path) -> tuple[str, int, str]:
    """Class, redundant transitions, and how the program ended."""
    report = json.loads(file.read_text(encoding="utf-8"))
    return report["class"], report["totals"]["redundant"]["transitions"], report["ended"]


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("0", 0, "finished"),
        ("7", 7, "ended with exit code 7"),
        ("raise", 1, "ended with exit code 1"),
        ("text", 1, "ended with exit code 1"),
    ],
)
def test_the_programs_ending_is_passed_on(
    program: Path, tmp_path: Path, ending: str, code: int, said: str
) -> None:
    out = tmp_path / "audit.json"
    ended = leangrpo("audit", "run", "--json", out, program, "--lr", "1", "--json", "x", ending)
    assert ended.code == code
    assert ended.out == f"arguments {['--lr', '1', '--json', 'x', ending]}\n"
    assert found(out) == ("recomputes", 12, said)
    assert (
        "recomputes" in ended.err and "redundant" in ended.err and "docs/adopting.md" in ended.err
    )
    assert ("KeyError: 'mine'" in ended.err) == (ending == "raise")
    assert "runpy" not in ended.err and "audit_run.py" not in ended.err


def test_modules(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(program.parent)
    ended = leangrpo("audit", "run", "-m", "trainer_of_mine", "--steps", "4", "0")
    assert (ended.code, ended.out) == (0, "arguments ['--steps', '4', '0']\n")
    assert "12" in ended.err


def test_exit_codes_for_ci(program: Path) -> None:
    assert leangrpo("audit", "run", "--fail-above", "0.0", program, "0").code == 3
    assert leangrpo("audit", "run", "--fail-above", "0.999", program, "0").code == 0
    assert leangrpo("audit", "run", "--fail-above", "0.0", program, "7").code == 7
    ended = leangrpo("audit", "run", "--fail-above", "0.0", "--module", "Nobody", program, "0")
    assert ended.code == 0 and "no call of a denoiser was seen" in ended.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs a program"),
        (("nowhere.py",), "there is no such file"),
        (("-m", "nowhere.at.all"), "there is no such module"),
        (("--fail-above", "5", "x.py"), "below 1"),
        (("--json", "nowhere/x.json", "x.py"), "cannot be written"),
    ],
)
def test_mistakes(words: tuple[str, ...], says: str) -> None:
    assert says in complaint(leangrpo("audit", "run", *words))


def test_ranks_write_files_of_their_own(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert run_audited(str(program), ["0"], json_file=tmp_path / "audit.json") == 0
        assert ("leangrpo audit" in capsys.readouterr().err) == (rank == "0")
        assert found(tmp_path / f"audit.rank{rank}.json")[:2] == ("recomputes", 12)


@pytest.mark.parametrize("ending", [pytest.param("os", marks=pytest.mark.slow), "hang"])
def test_a_program_that_leaves_at_once_or_is_terminated(
    program: Path, tmp_path: Path, ending: str
) -> None:
    out = tmp_path / "audit.json"
    words = [sys.executable, "-m", "leangrpo", "audit", "run", "--json", str(out), str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*words, ending], env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        if ending == "hang":
            assert process.stdout.readline().startswith("arguments")
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == {"os": 5, "hang": 143}[ending]
    assert found(out)[:2] == ("recomputes", 12)
    assert "docs/adopting.md" in errors
