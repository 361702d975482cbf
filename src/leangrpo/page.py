"""One HTML file that shows a run: no request leaves it, and it opens from a folder or a mail."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from . import __version__
from .charts import (
    Series,
    Value,
    bins,
    duration,
    line_chart,
    mean,
    number,
    percent,
    stacked_bars,
)
from .page_style import SCRIPT, STYLE
from .pictures import cut_out
from .runfolder import PAGE, VERIFIED, Run, read_run, replace_file

MOST_POINTS, MOST_BARS, MOST_SHEETS, MOST_PROMPTS = 400, 60, 24, 200

SCHEDULES = {
    "native": "every selected step is evaluated a second time, with gradients, once the rewards "
    "are known; the baseline that the other two are compared with",
    "retain": "the graphs of the selected steps are kept from sampling until the advantages are "
    "known; no second forward, at the price of the memory of those graphs",
    "reweight": "backward runs while sampling, each trajectory's gradient waits in a ledger, and "
    "its advantage scales it afterwards; no second forward and no graph is kept",
}

# In the order of the bars, from the bottom up: its colour, and what happens in it.
STAGES = {
    "rollout": ("--blue", "sampling: the denoiser's forwards"),
    "recompute": ("--orange", "native's second forward of selected steps"),
    "backward": ("--aqua", "gradients of selected steps"),
    "decode": ("--yellow", "latents to pictures"),
    "reward": ("--magenta", "waiting for the rewards"),
    "sync": ("--green", "gradients between devices"),
    "optimizer": ("--violet", "clipping and step"),
    "other": ("--grey", "everything else"),
}


def write_page(folder: str | Path) -> Path:
    """Write `report.html` into a run folder, finished or not; returns its path.

    Raises LeanError when the folder is no run or cannot be written to.
    """
    run = read_run(folder)
    path = run.folder / PAGE
    replace_file(path, render(run))
    return path


def render(run: Run) -> str:
    """The whole page of a run as HTML."""
    name = str(run.config.get("recipe") or run.folder.name)
    sections = [
        _headline(run),
        _section("Rewards", _rewards(run)),
        _section("Same prompts, same noise", _gallery(run)),
        _section("Where the time goes", _time(run)),
        _section("Gradient", _gradient(run)),
        _section("Held-out prompts", _prompts(run)),
        _section("Exactness", _exactness(run)),
        _section("How to read this page", _notes(run)),
        _section("Settings", _settings(run)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The browser itself refuses whatever would leave this file.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(name)} · leangrpo</title><style>{STYLE}</style></head><body><main>"
        f"{_header(run, name)}{''.join(sections)}"
        f'</main><footer>leangrpo {escape(_version(run))}</footer><div id="tip" role="status" '
        f"hidden></div><script>{SCRIPT}</script></body></html>\n"
    )


def _version(run: Run) -> str:
    return str((run.summary or {}).get("leangrpo", __version__))


def _header(run: Run, name: str) -> str:
    state = str((run.summary or {}).get("stopped", "not finished"))
    description = escape(str(run.config.get("description") or ""))
    paragraphs = f"<p>{description}</p>" if description else ""
    return (
        f"<header><h1>{escape(name)}</h1>"
        f'<span class="state {"good" if state == "finished" else ""}">{escape(state)}</span>'
        f"{paragraphs}</header>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>" if body else ""


# -- headline figures ------------------------------------------------------------------------------


def _headline(run: Run) -> str:
    last = run.evaluations[-1] if run.evaluations else {}
    done, wanted = (run.metrics[-1]["update"] if run.metrics else 0), run.config.get("updates")
    seconds = math.fsum(line["time"].get("total") or 0.0 for line in run.metrics)
    images = sum(line.get("images") or 0 for line in run.metrics)
    tiles: list[tuple[str, str, str]] = []
    if last.get("exact") is not None:
        exact = [percent(line.get("exact")) for line in run.evaluations]
        tiles.append(("held-out exact", _change(exact), f"of {last.get('num_prompts')} prompts"))
    if last.get("reward") is not None:
        reward = [number(line.get("reward")) for line in run.evaluations]
        tiles.append(("held-out reward", _change(reward), "mean over the prompts"))
    if run.metrics:
        trained = [number(line.get("reward_mean")) for line in run.metrics]
        tiles.append(("training reward", _change(trained), "first and last update"))
    of = f" of {wanted}" if isinstance(wanted, int) and wanted != done else ""
    schedule = escape(str(run.config.get("schedule", "")))
    tiles.append(("updates", f"{done}{of}", f"{schedule}, {images:,} pictures"))
    if seconds > 0:
        each = f"{number(seconds / len(run.metrics))} s an update"
        tiles.append(("time in updates", duration(seconds), each))
    cells = "".join(
        f"<div><dt>{label}</dt><dd>{value}</dd><small>{note}</small></div>"
        for label, value, note in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _change(values: Sequence[str]) -> str:
    """The first and the last of `values`, of which there may be only one."""
    if len(values) == 1:
        return values[0]
    return f'<span class="before">{values[0]}</span> <i aria-label="to">→</i> {values[-1]}'


# -- charts ----------------------------------------------------------------------------------------


def _figure(title: str, chart: str, legend: str = "", note: str = "") -> str:
    if not chart:
        return ""
    small = f"<small>{note}</small>" if note else ""
    return f"<figure><figcaption>{title}{legend}</figcaption>{chart}{small}</figure>"


def _legend(*entries: tuple[str, str]) -> str:
    keys = "".join(
        f'<span><b style="background:var({color})"></b>{escape(name)}</span>'
        for name, color in entries
    )
    return f'<span class="legend">{keys}</span>'


def _column(run: Run, key: str) -> tuple[list[float], list[Value]]:
    """A field over updates, averaged where there are more updates than a chart can show."""
    runs = bins(len(run.metrics), MOST_POINTS)
    xs = [float(run.metrics[r[-1]]["update"]) for r in runs]
    return xs, [mean([run.metrics[i].get(key) for i in r]) for r in runs]


def _averaged(run: Run, most: int) -> str:
    size = math.ceil(len(run.metrics) / most) if run.metrics else 1
    return f"means of up to {size} updates" if size > 1 else ""


def _evaluated(run: Run, key: str) -> tuple[list[float], list[Value]]:
    xs = [float(line["update"]) for line in run.evaluations]
    return xs, [line.get(key) for line in run.evaluations]


def _rewards(run: Run) -> str:
    xs, means = _column(run, "reward_mean")
    _, stds = _column(run, "reward_std")
    held_xs, held = _evaluated(run, "reward")
    _, exact = _evaluated(run, "exact")
    training = Series("training", "--blue", xs, means, spread=stds)
    heldout = Series("held-out", "--orange", held_xs, held, marks=True)
    there = [v for v in means if v is not None]
    label = "Reward over updates"
    if there:
        label += f": training mean from {number(there[0])} to {number(there[-1])}"
    legend = [("training, mean ± std", "--blue")] if there else []
    if any(v is not None for v in held):
        legend.append(("held-out", "--orange"))
    exact_label = "Share of held-out pictures that are right, over updates"
    share = Series("exact", "--orange", held_xs, exact, marks=True)
    figures = [
        _figure(
            "Reward",
            line_chart([training, heldout], label=label),
            _legend(*legend),
            _averaged(run, MOST_POINTS),
        ),
        _figure(
            "Held-out exact",
            line_chart([share], label=exact_label, fmt=percent, limits=(0.0, 1.0)),
        ),
    ]
    if not any(figures):
        return '<p class="none">No update and no evaluation yet.</p>'
    return f'<div class="pair">{"".join(figures)}</div>'


def _gradient(run: Run) -> str:
    xs, norms = _column(run, "grad_norm")
    xs_std, stds = _column(run, "advantage_std")
    _, largest = _column(run, "advantage_abs_max")
    clip = (run.config.get("optimizer") or {}).get("max_grad_norm")
    rule = (float(clip), f"clipped above {number(float(clip))}") if clip else None
    norm = line_chart(
        [Series("norm", "--blue", xs, norms)], label="Gradient norm over updates", rule=rule
    )
    kl_xs, kl = _column(run, "kl")
    spread = [
        Series("std", "--blue", xs_std, stds),
        Series("largest", "--orange", xs_std, largest),
    ]
    figures = [
        _figure("Norm before clipping", norm, note=_averaged(run, MOST_POINTS)),
        _figure(
            "Advantages",
            line_chart(spread, label="Standard deviation and largest advantage over updates"),
            _legend(("std", "--blue"), ("largest, either sign", "--orange")),
        ),
        _figure(
            "KL divergence from the start",
            line_chart([Series("KL", "--blue", kl_xs, kl)], label="KL divergence over updates"),
        ),
    ]
    return f'<div class="pair">{"".join(figures)}</div>' if any(figures) else ""


def _time(run: Run) -> str:
    if not run.metrics:
        return ""
    present = {k for line in run.metrics for k in line["time"]} - {"total", "images_per_s"}
    names = [s for s in STAGES if s in present] + sorted(present - set(STAGES))
    look = {n: STAGES.get(n, ("--grey", "")) for n in names}
    runs = bins(len(run.metrics), MOST_BARS)
    times = [line["time"] for line in run.metrics]
    stages = {n: [mean([times[i].get(n, 0.0) for i in r]) or 0.0 for r in runs] for n in names}
    labels = []
    for r in runs:
        a, b = run.metrics[r[0]]["update"], run.metrics[r[-1]]["update"]
        labels.append(f"{a}" if a == b else f"{a} to {b}, mean")
    averages = {n: mean([t.get(n, 0.0) for t in times]) or 0.0 for n in names}
    total = math.fsum(averages.values()) or 1.0
    names = [n for n in names if averages[n] > 0]
    if not names:
        return ""
    ends = (float(run.metrics[runs[0][-1]]["update"]), float(run.metrics[-1]["update"]))
    label = "Seconds of each update by stage; the means are in the table beside it"
    chart = stacked_bars(
        labels,
        {n: stages[n] for n in names},
        {n: look[n][0] for n in names},
        label=label,
        ends=ends,
    )
    rows = "".join(
        f'<tr><th scope="row"><b style="background:var({look[n][0]})"></b>{escape(n)}'
        f"<small>{escape(look[n][1])}</small></th><td>{number(averages[n])} s</td>"
        f'<td class="share"><span style="width:{100 * averages[n] / total:.1f}%"></span></td>'
        f"<td>{percent(averages[n] / total)}</td></tr>"
        for n in names
    )
    table = (
        '<table class="stages"><thead><tr><th scope="col">stage</th>'
        '<th scope="col" colspan="3">mean of an update</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )
    figure = _figure("Seconds per update", chart, note=_averaged(run, MOST_BARS))
    return f'<div class="pair">{figure}{table}</div>'


# -- pictures --------------------------------------------------------------------------------------


def _gallery(run: Run) -> str:
    """Each prompt's picture at the first evaluation and at the one the slider stands at."""
    shown = [line for line in run.evaluations if line.get("grid")]
    shown = [shown[r[-1] if i else 0] for i, r in enumerate(bins(len(shown), MOST_SHEETS))]
    sheets = [(line, cut_out(run.folder / line["grid"])) for line in shown]
    sheets = [(line, found) for line, found in sheets if found]
    if not sheets:
        return ""
    num = min(len(found) for _, found in sheets)
    last = len(sheets) - 1
    rows = [_rows(line) for line, _ in sheets]
    cards = []
    for i in range(num):
        row = [r[i] if i < len(r) else {} for r in rows]
        prompt = str(row[0].get("prompt", f"picture {i + 1}"))
        cards.append(_card(prompt, [f[i] for _, f in sheets], row))
    states = [
        {
            "update": line["update"],
            "text": ", ".join(
                part
                for part in (
                    f"reward {number(line.get('reward'))}",
                    "" if line.get("exact") is None else f"{percent(line['exact'])} exact",
                )
                if part
            ),
        }
        for line, _ in sheets
    ]
    data = {
        "states": states,
        "sources": [[found[i] for _, found in sheets] for i in range(num)],
        "scores": [[_score(r[i] if i < len(r) else {}) for r in rows] for i in range(num)],
    }
    slider = ""
    if last:
        slider = (
            '<div class="slider"><button type="button" id="play" aria-label="Play">▶</button>'
            f'<input type="range" id="at" min="0" max="{last}" value="{last}" '
            'aria-label="Evaluation shown on the right of each pair">'
            f'<output for="at" id="state">update {states[last]["update"]}: '
            f"{states[last]['text']}</output></div>"
        )
    left = f"update {states[0]['update']}"
    hint = f"Left: {left}. Right: the evaluation at the slider." if last else f"At {left}."
    return (
        f'<p class="hint">{hint}</p>{slider}<div class="cards">{"".join(cards)}</div>'
        f'<script type="application/json" id="gallery">{_script_json(data)}</script>'
    )


def _card(prompt: str, sources: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    text = escape(prompt, quote=True)
    before = f'<img src="{sources[0]}" alt="{text}, first evaluation">'
    after, to = "", ""
    if len(sources) > 1:
        after = f'<img class="now" src="{sources[-1]}" alt="{text}, last evaluation">'
        to = f' → <span class="score">{_score(rows[-1])}</span>'
    return (
        f'<figure class="card"><div>{before}{after}</div><figcaption title="{text}">'
        f"<span>{text}</span><small>{_score(rows[0])}{to}</small></figcaption></figure>"
    )


def _score(row: Mapping[str, Any]) -> str:
    exact = row.get("exact")
    mark = "" if exact is None else (" ✓" if exact >= 1 else " ✗")
    return f"{number(row.get('reward'))}{mark}"


# -- tables ----------------------------------------------------------------------------------------


def _rows(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    return line.get("per_prompt") or []


def _prompts(run: Run) -> str:
    if not run.evaluations or not _rows(run.evaluations[-1]):
        return ""
    before, after = _rows(run.evaluations[0]), _rows(run.evaluations[-1])
    num, after = len(after), after[:MOST_PROMPTS]
    most = f"The first {len(after)} of {num}, at" if num > len(after) else "At"
    exact = any(row.get("exact") is not None for row in after)
    body = "".join(_prompt_rows(before, after, exact))
    names = ["prompt", "reward before", "after", "change"]
    names += ["exact before", "after"] if exact else []
    head = "".join(
        f'<th scope="col"><button type="button" data-column="{i}">{name}</button></th>'
        for i, name in enumerate(names)
    )
    ends = [run.evaluations[i]["update"] for i in (0, -1)]
    updates = f"update {ends[0]}" if len(set(ends)) == 1 else f"updates {ends[0]} and {ends[1]}"
    return (
        f'<p class="hint">{most} {updates}; a click on a heading sorts.</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Held-out prompts">'
        f'<table id="prompts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _prompt_rows(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], exact: bool
) -> Iterator[str]:
    for i, row in enumerate(after):
        old: Mapping[str, Any] = before[i] if i < len(before) else {}
        a, b = old.get("reward"), row.get("reward")
        change = None if a is None or b is None else b - a
        sign = "" if not change else ("up" if change > 0 else "down")
        plus = "+" if change and change > 0 else ""
        yield (
            f'<tr><th scope="row">{escape(str(row.get("prompt", "")))}</th>'
            f"{_cell(a, number(a))}{_cell(b, number(b))}"
            f"{_cell(change, plus + number(change), sign)}"
        )
        if exact:
            for value in (old.get("exact"), row.get("exact")):
                mark = "–" if value is None else ("✓" if value >= 1 else "✗")
                label = {"✓": "right", "✗": "wrong"}.get(mark, "not known")
                yield _cell(value, f'<span role="img" aria-label="{label}">{mark}</span>', label)
        yield "</tr>"


def _cell(value: Value, text: str, kind: str = "") -> str:
    """A cell that sorts by `value`; what is missing sorts last."""
    key = "" if value is None else repr(float(value))
    return f'<td class="{kind}" data-value="{key}">{text}</td>'


# -- words -----------------------------------------------------------------------------------------


def _exactness(run: Run) -> str:
    """What `leangrpo verify RUN` found, where it was asked."""
    try:
        found = json.loads((run.folder / VERIFIED).read_text(encoding="utf-8"))
        rows = [row for row in found["rows"] if row["quantity"] == "gradient"]
        body = "".join(
            f"<tr><th>{escape(str(row['schedule']))}</th>"
            f"<td>{escape(str(row['protocol']).replace('_', ' '))}</td>"
            f"<td>{row['cosine']:.6f}</td><td>{row['rel_l2']:.2e}</td>"
            f"<td>{'yes' if row['bitwise'] else 'no'}</td></tr>"
            for row in rows
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    wrong = "".join(
        f"<p><b>{escape(str(b['schedule']))}</b>: {escape(str(b['diagnosis']))}</p>"
        for b in found.get("broken", [])
    )
    return (
        f"{wrong}<p>Gradients compared with native's by <code>leangrpo verify</code>.</p><table>"
        "<tr><th>schedule</th><th>protocol</th><th>cosine</th><th>relative L2</th>"
        f"<th>bitwise</th></tr>{body}</table>"
    )


def _notes(run: Run) -> str:
    schedule = str(run.config.get("schedule", ""))
    what = SCHEDULES.get(schedule, "a schedule of your own")
    items = [
        f"<b>Schedule {escape(schedule)}:</b> {what}. A schedule decides when a gradient is "
        "formed; the gradient is the same under all of them, up to rounding.",
        "<b>Training reward</b> is the mean over sampled pictures, whose prompts and noise differ "
        "from update to update. The band is one standard deviation to either side.",
        "<b>Held-out</b> prompts are not trained on. Each is sampled without added noise from the "
        "same initial noise at every evaluation, so what changes is the policy.",
    ]
    if any(line.get("exact") is not None for line in run.evaluations):
        items.append(
            "<b>Exact</b> is the share of held-out pictures in which the recogniser reads just "
            "the wanted text."
        )
    items += [f"<b>To look at:</b> {text}." for text in _remarks(run)]
    items.append(
        "Every number here is from <code>metrics.jsonl</code> and <code>evaluations.jsonl</code> "
        "beside this page."
    )
    return f'<ul class="notes">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def _remarks(run: Run) -> Iterator[str]:
    """What a reader of the numbers should not overlook."""
    skipped = sum(not line.get("optimizer_stepped", True) for line in run.metrics)
    if skipped:
        yield f"{skipped} of {len(run.metrics)} updates made no optimizer step"
    flat = sum(line.get("zero_variance_groups") or 0 for line in run.metrics)
    if flat:
        yield f"{flat} groups had equal rewards throughout, and so nothing to learn from"
    excluded = sum(line.get("excluded") or 0 for line in run.metrics)
    if excluded:
        yield f"{excluded} pictures had no finite score and were left out"
    if sum(line.get("grad_norm") is None for line in run.metrics):
        yield "some gradient norms were not finite"


def _settings(run: Run) -> str:
    text = yaml.safe_dump(
        run.config, sort_keys=False, allow_unicode=True, default_flow_style=None, width=88
    )
    return f"<details><summary>config.yaml</summary><pre>{escape(text)}</pre></details>"


def _script_json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data).replace("<", "\\u003c")
