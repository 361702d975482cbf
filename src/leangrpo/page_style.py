"""Style and script of the page: no library, no font and no picture from elsewhere."""

from __future__ import annotations

STYLE = """
:root {
  --page: #fbfbf9; --card: #ffffff; --ink: #16181b; --soft: #5c6269; --line: #e6e6e1;
  --good: #1a7a3c; --bad: #b3362f; --accent: #2a6fc4;
  --blue: #2a78d6; --orange: #e0662a; --aqua: #1baf7a; --yellow: #e3a008; --magenta: #d9659b;
  --green: #3f8f2f; --violet: #5b4bb5; --grey: #a9adb2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141517; --card: #1b1d20; --ink: #eceded; --soft: #9ba1a8; --line: #2e3135;
    --good: #58c07c; --bad: #ef8078; --accent: #6ba8f0;
    --blue: #4a94ec; --orange: #e57a43; --aqua: #27a577; --yellow: #cc9418; --magenta: #d4679a;
    --green: #5da34c; --violet: #8c7fe0; --grey: #6f757c;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main, footer { max-width: 1120px; margin: 0 auto; padding: 0 24px; }
header { padding: 44px 0 4px; }
h1 { display: inline; font-size: 30px; font-weight: 650; letter-spacing: -.02em;
  overflow-wrap: anywhere; }
header p { margin: 6px 0 0; color: var(--soft); font-size: 16px; max-width: 70ch; }
.state { margin-left: 10px; padding: 2px 10px; border: 1px solid var(--line); border-radius: 99px;
  color: var(--soft); font-size: 13px; vertical-align: 5px; white-space: nowrap; }
.state.good { color: var(--good); }
.state.good::before { content: "✓ "; }
section { margin-top: 44px; }
h2 { margin: 0 0 14px; font-size: 18px; font-weight: 620; letter-spacing: -.01em; }
small, .hint, .none, footer { color: var(--soft); font-size: 13px; }
.hint { margin: -8px 0 12px; }
.tiles { display: flex; flex-wrap: wrap; gap: 1px;
  margin: 26px 0 0; background: var(--line); border: 1px solid var(--line); border-radius: 12px;
  overflow: hidden; }
.tiles div { background: var(--card); padding: 16px 18px 14px; flex: 1 1 180px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 2px 0; font-size: 23px; font-weight: 600; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tiles .before { color: var(--soft); font-weight: 450; }
.tiles i { color: var(--soft); font-style: normal; font-weight: 400; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 16px; align-items: start; }
.pair > figure, .pair > table, .scroll, details { background: var(--card);
  border: 1px solid var(--line); border-radius: 12px; }
figure { margin: 0; }
.pair > figure { padding: 14px 14px 8px; overflow-x: auto; }
.pair > figure > figcaption { display: flex; flex-wrap: wrap; gap: 2px 18px;
  justify-content: space-between; margin: 0 4px 6px; font-weight: 560; }
.pair > figure:only-child { max-width: 560px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; color: var(--soft); font-size: 13px;
  font-weight: 400; }
.legend b, .stages b { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; }
.chart { display: block; width: 100%; min-width: 400px; max-width: 760px; height: auto;
  overflow: visible; border-radius: 6px; }
.chart text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.chart .name { font-size: 11.5px; }
.chart .grid { stroke: var(--line); }
.chart .axis, .chart .cursor { stroke: var(--grey); }
.chart .rule { stroke: var(--soft); stroke-dasharray: 4 4; }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .band { opacity: .15; }
.chart .mark { stroke: var(--card); stroke-width: 2; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
#tip { position: absolute; z-index: 2; max-width: 260px; padding: 8px 11px; border-radius: 8px;
  background: var(--ink); color: var(--page); font-size: 13px; line-height: 1.45;
  white-space: pre-line; pointer-events: none; font-variant-numeric: tabular-nums; }
#tip::first-line { font-weight: 600; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 16px; text-align: right; border-top: 1px solid var(--line);
  font-weight: 400; white-space: nowrap; }
thead th { border-top: 0; color: var(--soft); font-size: 13px; }
th:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.pair > table { border-collapse: separate; border-spacing: 0; padding: 6px 0; }
.stages th small { display: block; margin-left: 16px; line-height: 1.3; }
.stages .share { width: 26%; padding: 7px 0; }
.share span { display: block; height: 8px; border-radius: 4px; background: var(--grey);
  min-width: 1px; }
.slider { display: flex; flex-wrap: wrap; align-items: center; gap: 8px 14px; margin: 0 0 16px;
  position: sticky; top: 0; z-index: 1; padding: 10px 0; background: var(--page); }
.slider input { flex: 1 1 200px; max-width: 460px; accent-color: var(--blue); }
.slider output { min-width: 26ch; font-variant-numeric: tabular-nums; }
.slider button { width: 34px; height: 34px; border: 1px solid var(--line); border-radius: 50%;
  background: var(--card); color: var(--ink); font-size: 12px; cursor: pointer; }
.cards { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 246px), 1fr)); }
.card { padding: 10px; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; break-inside: avoid; }
.card div { display: flex; gap: 6px; }
.card img { flex: 1 1 0; min-width: 0; max-width: 256px; aspect-ratio: auto; border-radius: 6px;
  background: var(--line); }
.card img[src^="data:image/png"] { image-rendering: pixelated; }
.card figcaption span { overflow-wrap: anywhere; }
.card figcaption > span { display: -webkit-box; -webkit-box-orient: vertical;
  -webkit-line-clamp: 2; overflow: hidden; margin-top: 7px; font-size: 14px; line-height: 1.35; }
.card small { font-variant-numeric: tabular-nums; }
.card .score { color: var(--ink); }
.scroll { max-height: 460px; overflow: auto; }
.scroll thead th { position: sticky; top: 0; background: var(--card); padding-block: 4px;
  box-shadow: 0 1px var(--line); }
.scroll tbody tr:first-child > * { border-top: 0; }
.scroll button { padding: 4px 0; border: 0; background: none; color: inherit; font: inherit;
  cursor: pointer; }
.scroll button:hover { color: var(--ink); }
th[aria-sort="ascending"] button::after { content: " ↑"; }
th[aria-sort="descending"] button::after { content: " ↓"; }
.up, .right { color: var(--good); }
.wrong { color: var(--soft); }
.down { color: var(--bad); }
.notes { margin: 0; padding-left: 20px; max-width: 86ch; }
.notes li { margin: 5px 0; }
details summary { padding: 12px 16px; cursor: pointer; }
pre { margin: 0; padding: 4px 18px 16px; overflow-x: auto; font-size: 13px; line-height: 1.5; }
@media print { pre { white-space: pre-wrap; } }
pre, code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: 13px; }
footer { padding-top: 44px; padding-bottom: 36px; }
@media (max-width: 560px) {
  main, footer { padding-inline: 14px; }
  header { padding-top: 26px; }
  .tiles div { flex-basis: 150px; padding-inline: 14px; }
  .tiles dd { font-size: 19px; }
  th, td { padding-inline: 10px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 8px; }
  .card { padding: 7px; }
}
@media print {
  @page { margin: 14mm; }
  :root { --page: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #ccc; }
  body { font-size: 12px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .slider, #tip { display: none; }
  .scroll { max-height: none; overflow: visible; }
  .scroll thead th { position: static; }
  .cards { grid-template-columns: repeat(4, 1fr); }
  .pair { grid-template-columns: 1fr 1fr; }
  .chart { min-width: 0; }
  section { margin-top: 26px; }
  th, td { padding: 3px 10px; }
  figure, tr, .tiles, .pair { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""

SCRIPT = """
"use strict";
const tip = document.getElementById("tip");
for (const chart of document.querySelectorAll(".chart")) {
  const tips = JSON.parse(chart.dataset.tips), cursor = chart.querySelector(".cursor");
  let at = -1;
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  const show = i => {
    if (!tips.length) return;
    at = Math.max(0, Math.min(tips.length - 1, i));
    const [x, text] = tips[at], box = chart.getBoundingClientRect();
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    tip.textContent = text; tip.hidden = false;
    const left = box.left + x * box.width / chart.viewBox.baseVal.width;
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const beside = left + 14 <= room ? left + 14 : left - tip.offsetWidth - 14;
    tip.style.left = Math.max(8, Math.min(room, beside)) + scrollX + "px";
    tip.style.top = box.top + scrollY + 10 + "px";
  };
  chart.addEventListener("pointermove", event => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * chart.viewBox.baseVal.width / box.width;
    let near = 0;
    tips.forEach((t, i) => { if (Math.abs(t[0] - x) < Math.abs(tips[near][0] - x)) near = i; });
    show(near);
  });
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    show(at < 0 && step < 0 ? tips.length - 1 : at + step);
  });
}
const at = document.getElementById("at");
if (at) {
  const data = JSON.parse(document.getElementById("gallery").textContent);
  const now = document.querySelectorAll(".now"), scores = document.querySelectorAll(".score");
  const state = document.getElementById("state"), play = document.getElementById("play");
  let timer = 0;
  const show = () => {
    const i = Number(at.value), s = data.states[i], text = `update ${s.update}: ${s.text}`;
    now.forEach((image, n) => {
      image.src = data.sources[n][i];
      image.alt = image.alt.replace(/, [^,]*$/, `, update ${s.update}`);
    });
    scores.forEach((score, n) => { score.textContent = data.scores[n][i]; });
    state.textContent = text; at.setAttribute("aria-valuetext", text);
  };
  const stop = () => {
    clearInterval(timer); timer = 0;
    play.textContent = "▶"; play.setAttribute("aria-label", "Play");
  };
  at.addEventListener("input", () => { stop(); show(); });
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (at.value === at.max) at.value = 0;
    show(); play.textContent = "❚❚"; play.setAttribute("aria-label", "Pause");
    timer = setInterval(() => {
      at.value = Number(at.value) + 1; show();
      if (at.value === at.max) stop();
    }, 700);
  });
  addEventListener("beforeprint", () => { stop(); at.value = at.max; show(); });
  at.value = at.max; show();
}
const table = document.getElementById("prompts");
if (table) table.tHead.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  const head = button.parentElement, column = Number(button.dataset.column);
  const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const key = row => {
    const cell = row.children[column];
    return column ? cell.dataset.value : cell.textContent;
  };
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => {
    const x = key(a), y = key(b);
    if (column === 0) return sign * x.localeCompare(y, undefined, { numeric: true });
    if (x === "" || y === "") return (x === "") - (y === "");
    return sign * (Number(x) - Number(y));
  });
  table.tBodies[0].append(...rows);
});
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
"""
