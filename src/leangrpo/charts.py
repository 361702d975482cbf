"""Line charts and stacked bars as inline SVG, coloured by CSS variables, read out by a script.

Every chart carries its tooltips in `data-tips`: a JSON list of `[x, text]`, x in the units of its
own view box. Colours are names of CSS variables, so that one drawing serves light and dark.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 36

Value = float | None
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: `ys` over `xs`, None where there is no value; `spread` is drawn as a band."""

    name: str
    color: str
    xs: Sequence[float]
    ys: Sequence[Value]
    spread: Sequence[Value] | None = None
    marks: bool = False


def number(value: Value, digits: int = 3) -> str:
    """About `digits` significant digits, with a real minus sign; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size and (size < 1e-3 or size >= 1e6):
        text = f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e")
    else:
        whole = math.floor(math.log10(size)) + 1 if size else 1
        text = f"{value:,.{min(max(digits - whole, 0), digits)}f}"
        if not float(text.replace(",", "")):
            text = text.lstrip("-")
    return text.replace("-", "−")


def percent(value: Value) -> str:
    """A share as a percentage; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{100 * value:.0f}%" if value in (0, 1) else f"{100 * value:.1f}%".replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds in the two largest units that matter."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s" if seconds >= 10 else f"{seconds:.1f} s"


def bins(num: int, most: int) -> list[range]:
    """Cut `num` consecutive items into at most `most` runs of (nearly) equal length."""
    count = min(num, most)
    return [range(i * num // count, (i + 1) * num // count) for i in range(count)]


def mean(values: Sequence[Value]) -> Value:
    """The mean of what is there; None when nothing is."""
    there = [v for v in values if v is not None and math.isfinite(v)]
    return math.fsum(there) / len(there) if there else None


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that span `[low, high]`, roughly `about` of them."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def tick_texts(values: Sequence[float], scale: float = 1.0, unit: str = "") -> list[str]:
    """Evenly spaced `values` times `scale`, all with as many decimals as their distance needs."""
    step = abs(values[1] - values[0]) * scale
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if decimals > 4 or step >= 1e5:
        return [f"{number(v * scale, 2)}{unit}" for v in values]
    return [f"{v * scale:,.{decimals}f}{unit}".replace("-", "−") for v in values]


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    fmt: Format = number,
    limits: tuple[float, float] | None = None,
    rule: tuple[float, str] | None = None,
) -> str:
    """An SVG of `series` over updates; empty when no series has a value.

    `limits` fixes the range of y. `rule` is a horizontal line with its name, left out where it
    would squeeze the lines into less than a quarter of the height.
    """
    values = [
        y + sign * s
        for one in series
        for y, s in zip(one.ys, one.spread or [0.0] * len(one.ys), strict=True)
        if y is not None
        for sign, s in ((-1, s or 0.0), (1, s or 0.0))
    ]
    if not values:
        return ""
    low, high = limits or (min(values), max(values))
    if rule and (high - low) < (max(high, rule[0]) - min(low, rule[0])) / 4:
        rule = None
    if rule:
        low, high = min(low, rule[0]), max(high, rule[0])
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):
        low, high = low - max(abs(low), 1e-3) / 2, high + max(abs(high), 1e-3) / 2
    y_ticks = ticks(low, high)
    xs = sorted({x for one in series for x in one.xs})
    x_low, x_high = xs[0], max(xs[-1], xs[0] + 1)

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        share = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    texts = tick_texts(y_ticks, 100, "%") if fmt is percent else tick_texts(y_ticks)
    parts = [_grid(y_ticks, texts, py), _x_axis(xs[0], xs[-1], px)]
    if rule:
        y = py(rule[0])
        parts.append(
            f'<line class="rule" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="name" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">'
            f"{escape(rule[1])}</text>"
        )
    for one in series:
        parts += _band(one, px, py)
    for one in series:
        parts += _line(one, px, py)
    tips = [
        [round(px(x), 1), "\n".join([f"update {x:g}", *_at(series, x, fmt)])]
        for x in xs
        if _at(series, x, fmt)
    ]
    return _svg(parts, label, tips)


def stacked_bars(
    labels: Sequence[str],
    stages: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    *,
    label: str,
    ends: tuple[float, float],
) -> str:
    """An SVG of one bar per entry of `labels`, `stages` (seconds each) on top of one another."""
    totals = [math.fsum(column) for column in zip(*stages.values(), strict=True)]
    y_ticks = ticks(0.0, max(totals, default=0.0) or 1.0)
    room = (WIDTH - LEFT - RIGHT) / max(len(labels), 1)
    bar = min(room - min(2.0, room / 4), 44.0)

    def px(x: float) -> float:
        span = max(ends[1] - ends[0], 1)
        return LEFT + room / 2 + (x - ends[0]) / span * (WIDTH - LEFT - RIGHT - room)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - y / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [_grid(y_ticks, tick_texts(y_ticks, 1, " s"), py), _x_axis(*ends, px)]
    tips: list[list[object]] = []
    for i, name in enumerate(labels):
        left, below = LEFT + (i + 0.5) * room - bar / 2, 0.0
        text = [f"update {name}", f"total {number(totals[i])} s"]
        for stage, seconds in stages.items():
            top, height = py(below + seconds[i]), py(below) - py(below + seconds[i])
            below += seconds[i]
            if seconds[i] > 0:
                text.append(f"{stage} {number(seconds[i])} s")
            if height > 0.2:
                gap = 1.0 if height > 3 else 0.0  # lets the page show between neighbours
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{bar:.1f}" '
                    f'height="{height - gap:.1f}" fill="var({colors[stage]})"/>'
                )
        tips.append([round(left + bar / 2, 1), "\n".join(text)])
    return _svg(parts, label, tips)


def _at(series: Sequence[Series], x: float, fmt: Format) -> list[str]:
    """What each series says at `x`, a line each."""
    lines = []
    for one in series:
        for i, other in enumerate(one.xs):
            y = one.ys[i]
            if other == x and y is not None:
                spread = one.spread[i] if one.spread else None
                plus = "" if spread is None else f" ± {fmt(spread)}"
                lines.append(f"{one.name} {fmt(y)}{plus}")
    return lines


def _svg(parts: Sequence[str], label: str, tips: Sequence[Sequence[object]]) -> str:
    data = escape(json.dumps(tips), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{escape(label, quote=True)}" data-tips="{data}">{"".join(parts)}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
    )


def _grid(y_ticks: Sequence[float], texts: Sequence[str], py: Callable[[float], float]) -> str:
    return "".join(
        f'<line class="{"axis" if i == 0 else "grid"}" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
        f'y1="{py(y):.1f}" y2="{py(y):.1f}"/>'
        f'<text x="{LEFT - 8}" y="{py(y) + 4:.1f}" text-anchor="end">{text}</text>'
        for i, (y, text) in enumerate(zip(y_ticks, texts, strict=True))
    )


def _x_axis(low: float, high: float, px: Callable[[float], float]) -> str:
    wanted = [t for t in ticks(low, max(high, low + 1), 6) if low <= t <= high and t == int(t)]
    marks = "".join(
        f'<text x="{px(x):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{x:g}</text>'
        for x in wanted or [low]
    )
    name = (
        f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">update</text>'
    )
    return marks + name


def _runs(one: Series) -> list[list[int]]:
    """Stretches of consecutive points that have a value."""
    runs: list[list[int]] = [[]]
    for i, y in enumerate(one.ys):
        if y is None:
            runs.append([])
        else:
            runs[-1].append(i)
    return [run for run in runs if run]


def _band(one: Series, px: Callable[[float], float], py: Callable[[float], float]) -> list[str]:
    if one.spread is None:
        return []
    parts = []
    for run in _runs(one):
        edge = [
            (px(one.xs[i]), py((one.ys[i] or 0.0) + sign * (one.spread[i] or 0.0)))
            for sign, order in ((1, run), (-1, run[::-1]))
            for i in order
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        parts.append(f'<polygon class="band" points="{points}" fill="var({one.color})"/>')
    return parts


def _line(one: Series, px: Callable[[float], float], py: Callable[[float], float]) -> list[str]:
    parts = []
    for run in _runs(one):
        at = [(px(one.xs[i]), py(one.ys[i] or 0.0)) for i in run]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline class="line" points="{points}" stroke="var({one.color})"/>')
        if (one.marks and len(one.xs) <= 30) or len(run) == 1:
            parts += [
                f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="var({one.color})"/>'
                for x, y in at
            ]
    return parts
