"""What the library adds to a pipeline's own call, in percent of a step, and what each part takes.

    taskset -c 1 python benchmarks/overhead.py [FOLDER] [--dtype bfloat16] [--json FILE]

FOLDER is a pipeline in diffusers format; without one, the model of scripts/make_bench_model.py
(SD3, 30.8 million parameters) is written to a temporary folder. Two callers run in turn over the
same weights, prompts and initial latents: the pipeline's bare call, with its own scheduler and
without a hook, and `Policy.sample` with the selected steps recorded. Both find the prompts encoded,
and neither decodes. Once without gradients, and once with: the bare call then runs its denoiser
under `torch.enable_grad` and drops the graph.

One thread is timed by its processor time, which other programs do not add to; more, by the clock.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from timeit import Timer
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor, nn

from leangrpo.bench_model import make_bench_model
from leangrpo.compiling import detached
from leangrpo.components import denoisers
from leangrpo.console import for_tables
from leangrpo.data import SampleKey, Transition
from leangrpo.gradients import Local
from leangrpo.hook import DenoiserHook
from leangrpo.ledger import Ledger
from leangrpo.loading import load_pipeline
from leangrpo.machine import machine
from leangrpo.noise import normal
from leangrpo.policy import Policy, Sampling
from leangrpo.tape import Tape

CALL = {"height": 64, "width": 64, "max_sequence_length": 16}
"""How the model of make_bench_model.py is called."""


class Sides(NamedTuple):
    """The same weights twice: a policy, and a pipeline that knows of none."""

    policy: Policy
    bare: Any
    keys: list[SampleKey]
    prompts: list[str]
    selected: list[int]
    latents: Tensor

    def call_policy(self, grad: bool) -> None:
        """Sample, with the selected steps recorded."""
        self.policy.sample(
            self.prompts,
            self.keys,
            selected=self.selected,
            grad=grad,
            decode=False,
            on_transition=lambda _: None,
        )

    def call_bare(self) -> None:
        """The pipeline's own call, from the same latents."""
        sampling = self.policy.sampling
        self.bare(
            prompt=self.prompts,
            num_inference_steps=sampling.steps,
            guidance_scale=sampling.guidance,
            latents=self.latents.clone(),
            output_type="latent",
            **sampling.call,
        )


def make_sides(
    pipe: Any, call: dict[str, Any], *, steps: int, selected: int, guidance: float, batch: int
) -> Sides:
    """A policy over `pipe` that records the last `selected` of its steps, and a copy without one.

    The copy's modules are its own and its parameters are the same memory. Everything a denoiser
    has is trained.
    """
    for module in denoisers(pipe).values():
        module.requires_grad_(True)
    bare = copy.deepcopy(pipe, {id(t): t for t in _tensors(pipe)})
    bare.set_progress_bar_config(disable=True)
    encode, encoded = bare.encode_prompt, []

    def encode_once(*args: Any, **kwargs: Any) -> Any:
        if not encoded:
            encoded.append(encode(*args, **kwargs))
        return encoded[0]

    bare.encode_prompt = encode_once
    policy = Policy(pipe, Sampling(steps, guidance=guidance, call=call))
    keys = [SampleKey(0, 0, m) for m in range(batch)]
    latents = policy.initial_noise(Tape(keys=tuple(keys)), policy.plan())
    if latents is None:
        raise SystemExit("This pipeline draws its start itself: the two would not do the same.")
    dtype = next(iter(denoisers(bare).values())).dtype
    every = range(steps - selected, steps)
    return Sides(policy, bare, keys, ["a test"] * batch, [*every], latents.to(dtype))


def _tensors(pipe: Any) -> Iterator[Tensor]:
    for component in pipe.components.values():
        if isinstance(component, nn.Module):
            yield from component.parameters()
            yield from component.buffers()


@contextmanager
def timed(pipe: Any, *, grad: bool) -> Iterator[list[float]]:
    """Inside, seconds of every denoiser's forward, hooks not included, are added to the list.

    With `grad` they run with gradients, as in a bare pipeline nothing asks them to.
    """
    now, spent = clock(), []

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = now()
            with torch.enable_grad() if grad else nullcontext():
                output = forward(*args, **kwargs)
            spent.append(now() - start)
            return output

        return functools.wraps(forward)(run)

    modules = denoisers(pipe).values()
    for module in modules:
        module.forward = wrap(module.forward)
    try:
        yield spent
    finally:
        for module in modules:
            del module.forward


def clock() -> Callable[[], float]:
    """Processor time where one thread does all, else wall time."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def calls(sides: Sides, grad: bool, rounds: int) -> dict[str, Any]:
    """Time the two calls A B, B A, ...; by how much the policy's is slower, in percent.

    `overhead` is the median of the rounds' own ratios. `outside` is the median of what the policy
    takes more outside the network's forward, in percent of the bare call: the part that the
    library is made of, which does not see the noise of the network's own time. Each with its
    quartiles. The first round warms up and is dropped.
    """
    now = clock()
    whole: list[tuple[float, float]] = []
    rest: list[tuple[float, float]] = []
    callers = (sides.call_bare, lambda: sides.call_policy(grad))
    with timed(sides.bare, grad=grad) as of_bare, timed(sides.policy.pipe, grad=False) as of_policy:
        for turn in range(rounds + 1):
            seconds, network = [0.0, 0.0], [0.0, 0.0]
            for which in (0, 1) if turn % 2 else (1, 0):
                inner = (of_bare, of_policy)[which]
                inner.clear()
                start = now()
                callers[which]()
                seconds[which] = now() - start
                network[which] = sum(inner)
            if turn:
                whole.append((seconds[0], seconds[1]))
                rest.append((seconds[0] - network[0], seconds[1] - network[1]))
    bare, policy = (statistics.median(some) for some in zip(*whole, strict=True))
    return {
        "gradients": grad,
        "bare_s": bare,
        "policy_s": policy,
        **_quartiles("overhead", [100 * (b / a - 1) for a, b in whole]),
        **_quartiles("outside", [100 * (b - a) / bare for a, b in rest]),
    }


def _quartiles(name: str, values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return {name: middle, f"{name}_low": low, f"{name}_high": high}


class Piece(NamedTuple):
    """A part of the library, and how often it runs."""

    name: str
    per: str
    run: Callable[[], object]


def pieces(sides: Sides) -> list[Piece]:
    """Every part that a step, a trajectory or an update meets, alone."""
    policy, i = sides.policy, sides.selected[0]
    name, module = policy.names[0], policy.denoisers[0]
    args, kwargs = _inputs(sides)
    table, shape = policy.plan().table, policy.plan().shape
    x = sides.latents.float()
    output = torch.randn_like(x)
    tape = Tape(
        keys=tuple(sides.keys),
        prompts=tuple(sides.prompts),
        selected=frozenset([i]),
        noisy=frozenset([i]),
        sink=lambda t: None,
    )
    scheduler, stock = policy.pipe.scheduler, sides.bare.scheduler
    step = policy.kernel.step(x, output, table, i)
    hook = DenoiserHook(policy, name, module)

    def call_hook() -> None:
        hook(module, args, kwargs)

    def take_step(one: Any, **state: Any) -> Callable[[], object]:
        def run() -> None:
            vars(one).update(state)
            tape.cursor = i
            one.step(output, stock.timesteps[i], x, return_dict=False)

        return run

    def transition() -> Transition:
        return Transition(
            keys=tape.keys,
            step=i,
            log_prob=log_prob,
            prompts=tape.prompts,
            latents=x,
            next_latents=x,
            mean=step.mean,
            std=step.std,
            kl_std=step.kl_std,
            output=output,
            version=policy.version,
        )

    log_prob = policy.kernel.log_prob(x, step)
    kept = transition()
    kept.log_prob = log_prob.clone().requires_grad_()
    scheduler.tape = tape
    policy.guard.mark("reweight", needs_graph=True)
    return [
        Piece("noise", "step", lambda: normal(0, sides.keys, i, shape, like=x)),
        Piece("kernel: mean and std", "step", lambda: policy.kernel.step(x, output, table, i)),
        Piece("kernel: log-probability", "step", lambda: policy.kernel.log_prob(x, step)),
        Piece("hook", "step", call_hook),
        Piece("transition", "step", lambda: detached(transition())),
        Piece("scheduler.step, all of it", "step", take_step(scheduler, cursor=i)),
        Piece("the pipeline's own scheduler.step", "step", take_step(stock, _step_index=i)),
        Piece("guard: accept", "step", lambda: policy.guard.accept(kept, "reweight")),
        *_ledger_pieces(policy),
        Piece("guard: check", "group", lambda: policy.guard.check("reweight")),
        Piece("guard: mark", "update", lambda: policy.guard.mark("reweight", needs_graph=True)),
    ]


def _ledger_pieces(policy: Policy) -> list[Piece]:
    """Reweight's: a trajectory's gradient moved around a backward, and its fold into the sum."""
    gradients, ledger = Local(policy.guard), Ledger(policy.parameters)
    gradient: list[Tensor | None] = [torch.full_like(p, 1e-3) for p in policy.parameters]
    ledger.hold("a", gradient)
    ledger.hold("first", [torch.zeros_like(p) for p in policy.parameters])
    ledger.fold("first", 1.0)
    ledger.settle()  # the sum has its memory now

    def accumulate() -> None:
        gradients.put(ledger.reopen("a"))
        ledger.hold("a", gradients.take())

    def fold() -> None:
        ledger.hold("b", list(gradient))
        ledger.fold("b", 0.5)
        ledger.settle()

    return [
        Piece("ledger: a backward's gradient held", "step", accumulate),
        Piece("ledger: fold", "trajectory", fold),
    ]


def _inputs(sides: Sides) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the bare pipeline calls its denoiser with."""
    seen: list[tuple[Any, Any]] = []

    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append((args, kwargs))

    module = next(iter(denoisers(sides.bare).values()))
    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    sides.call_bare()
    handle.remove()
    return seen[0]


def time_pieces(sides: Sides, repeats: int, least_s: float = 0.02) -> list[dict[str, Any]]:
    """Each piece's median seconds and its percent of a forward without gradients."""
    args, kwargs = _inputs(sides)
    module = next(iter(denoisers(sides.bare).values()))
    with torch.no_grad():
        forward = _seconds(lambda: module(*args, **kwargs), repeats, least_s)
        rows = [{"piece": "a forward", "per": "step", "seconds": forward, "of_forward": 100.0}]
        for one in pieces(sides):
            seconds = _seconds(one.run, repeats, least_s)
            share = 100 * seconds / forward
            rows.append(
                {"piece": one.name, "per": one.per, "seconds": seconds, "of_forward": share}
            )
    sides.policy.pipe.scheduler.tape = None
    return rows


def _seconds(run: Callable[[], object], repeats: int, least_s: float) -> float:
    timer, number = Timer(run, timer=clock()), 1
    while timer.timeit(number) < least_s:
        number *= 2
    return statistics.median(timer.repeat(repeats, number)) / number


def bench_model(folder: Path) -> Path:
    """Write the model of scripts/make_bench_model.py."""
    make_bench_model(folder)
    return folder


def measure(
    pipe: Any,
    call: dict[str, Any],
    *,
    steps: int,
    selected: int,
    guidance: float = 1.0,
    batch: int = 1,
    rounds: int,
    repeats: int = 7,
) -> dict[str, Any]:
    """Whole calls and pieces of a pipeline; see the module."""
    sides = make_sides(pipe, call, steps=steps, selected=selected, guidance=guidance, batch=batch)
    return {
        "machine": machine(),
        "parameters": sum(p.numel() for p in sides.policy.parameters),
        "dtype": str(sides.latents.dtype).removeprefix("torch."),
        "steps": steps,
        "selected": selected,
        "batch": batch,
        "guidance": guidance,
        "rounds": rounds,
        "calls": [calls(sides, grad, rounds) for grad in (False, True)],
        "pieces": time_pieces(sides, repeats),
    }


def show(result: dict[str, Any]) -> None:
    """Print the two tables."""
    console = for_tables()
    m, steps = result["machine"], result["steps"]
    console.print(
        f"{result['parameters'] / 1e6:.1f}M parameters, {result['dtype']}, "
        f"{result['selected']} of {steps} steps selected, batch {result['batch']}, "
        f"guidance {result['guidance']:g}; {m['processor']}, {m['threads']} thread(s), "
        f"torch {m['torch']}"
    )
    table = Table(title=f"the library over the bare call, {result['rounds']} rounds in turn")
    columns = ("bare step, ms", "policy step, ms", "overhead", "quartiles")
    for column in ("gradients", *columns, "outside the network", "quartiles"):
        table.add_column(column, justify="right")
    for row in result["calls"]:
        table.add_row(
            "on" if row["gradients"] else "off",
            f"{1000 * row['bare_s'] / steps:.2f}",
            f"{1000 * row['policy_s'] / steps:.2f}",
            f"{row['overhead']:+.2f}%",
            f"{row['overhead_low']:+.2f} to {row['overhead_high']:+.2f}%",
            f"{row['outside']:+.3f}%",
            f"{row['outside_low']:+.3f} to {row['outside_high']:+.3f}%",
        )
    console.print(table)
    table = Table(title="each part alone")
    table.add_column("part")
    for column in ("once per", "ms", "of a forward"):
        table.add_column(column, justify="right")
    for row in result["pieces"]:
        ms, share = 1000 * row["seconds"], row["of_forward"]
        table.add_row(row["piece"], row["per"], f"{ms:.4f}", f"{share:.3f}%")
    console.print(table)


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a pipeline; default: a made one")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--selected", type=int, help="the last so many steps (default: all)")
    parser.add_argument("--guidance", type=float, default=1.0, help="above 1: two rows a sample")
    parser.add_argument("--batch", type=int, default=1, help="samples in a forward")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args(words)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or bench_model(Path(scratch) / "model")
        pipe = load_pipeline(str(folder), dtype=getattr(torch, given.dtype))
    result = measure(
        pipe,
        CALL,
        steps=given.steps,
        selected=given.selected or given.steps,
        guidance=given.guidance,
        batch=given.batch,
        rounds=given.rounds,
    )
    show(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
