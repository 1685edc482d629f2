"""CSS and the scripts of the HTML report: colours follow the system, and everything but sorting and zoom is CSS."""

CSS = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2024; --soft: #60646c; --line: #d9dce0; --panel: #f6f7f8;
  --bar: #2f6fb3; --band: #dbe9f6; --good: #18794e; --bad: #c62a2f; --edge: #a3a9b1;
  --n0: #e3f1e8; --n1: #f3f0c9; --n2: #fbe0b0; --n3: #f7c09a; --n4: #ef9a94;
  --b2: #f7c09a; --b4: #fbe0b0; --b6: #e0ebc2; --b8: #cfe3f5; --b16: #e4def5; }
@media (prefers-color-scheme: dark) { :root { --page: #15181b; --ink: #e8eaed; --soft: #a0a6ad; --line: #363b41;
  --panel: #1e2226; --bar: #6ea8e0; --band: #24384c; --good: #4cc38a; --bad: #ff8589; --edge: #6b737c;
  --n0: #1f3a2c; --n1: #45431b; --n2: #59421a; --n3: #6b3a1c; --n4: #7a2b2b;
  --b2: #6b3a1c; --b4: #59421a; --b6: #3b4620; --b8: #1f3d5c; --b16: #3b3160; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 0 0 8px; max-width: 75ch; }
ul { padding-left: 20px; }
li { overflow-wrap: anywhere; margin-bottom: 4px; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
code { background: var(--panel); padding: 1px 4px; border-radius: 3px; }
pre { background: var(--panel); padding: 12px; overflow-x: auto; }
summary { cursor: pointer; color: var(--soft); margin: 8px 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 12px; margin: 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 10px 9px; }
.tile dt, .tile p, footer { color: var(--soft); font-size: 13px; margin: 0; }
.tile dd { margin: 0; font-size: 15px; font-weight: 600; }
.chart { display: block; }
.chart text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.chart tspan { fill: var(--soft); }
.chart rect { fill: var(--bar); }
.chart .was { fill: var(--line); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 12px; }
figure { margin: 0; border: 1px solid var(--line); border-radius: 6px; padding: 8px 10px; min-width: 0; }
figcaption { font-size: 13px; overflow-wrap: anywhere; margin-bottom: 4px; }
figure p { color: var(--soft); font-size: 12px; line-height: 1.4; margin: 2px 0 6px; }
.bins { display: block; width: 100%; height: 44px; }
.bins rect { fill: var(--band); }
.bins path { fill: var(--bar); }
.graph { overflow: auto; max-height: 75vh; border: 1px solid var(--line); border-radius: 6px; background: var(--panel);
  overscroll-behavior: contain; }
.graph.drag { cursor: grabbing; user-select: none; }
.graph svg { display: block; margin: auto; }
.graph text { font: 11px system-ui, sans-serif; fill: var(--ink); }
.graph tspan { fill: var(--soft); }
.graph rect { fill: var(--page); stroke: var(--edge); stroke-width: 1; }
.graph .io rect { stroke-dasharray: 4 3; }
.graph a:focus-visible rect, .graph a:hover rect { stroke: var(--bar); stroke-width: 2; }
.edges { fill: none; stroke: var(--edge); stroke-width: 1.2; }
.by { display: flex; flex-wrap: wrap; gap: 4px 14px; align-items: center; font-size: 13px; margin: 0 0 8px; }
.by button { font: inherit; min-width: 32px; }
.key { display: none; gap: 4px 10px; flex-wrap: wrap; color: var(--soft); }
.key span::before { content: ""; display: inline-block; width: 12px; height: 12px; margin-right: 4px;
  border-radius: 2px; vertical-align: -1px; background: var(--c); border: 1px solid var(--edge); }
section:has(#by-error:checked) .key.error, section:has(#by-bits:checked) .key.bits { display: flex; }
section:has(#by-error:checked) .e0 rect { fill: var(--n0); }
section:has(#by-error:checked) .e1 rect { fill: var(--n1); }
section:has(#by-error:checked) .e2 rect { fill: var(--n2); }
section:has(#by-error:checked) .e3 rect { fill: var(--n3); }
section:has(#by-error:checked) .e4 rect { fill: var(--n4); }
section:has(#by-bits:checked) .b2 rect { fill: var(--b2); }
section:has(#by-bits:checked) .b4 rect { fill: var(--b4); }
section:has(#by-bits:checked) .b6 rect { fill: var(--b6); }
section:has(#by-bits:checked) .b8 rect { fill: var(--b8); }
section:has(#by-bits:checked) .b16 rect { fill: var(--b16); }
.wide { overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: 13px; }
.wide table { width: 100%; }
th, td { text-align: left; padding: 5px 8px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.wide td.words { white-space: normal; min-width: 14ch; }
.wide td.words:last-child { min-width: 29ch; }
.wide tr:last-child td { border-bottom: 0; }
.wide thead th { background: var(--panel); position: sticky; top: 0; }
tr:target td { background: var(--band); }
td[data-n] { font-variant-numeric: tabular-nums; }
thead th button { all: unset; cursor: pointer; }
thead th button:focus-visible { outline: 2px solid var(--bar); }
th[aria-sort] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.facts th { font-weight: 600; vertical-align: top; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; }
.bad, .tile.failed dd { color: var(--bad); font-weight: 600; }
.tile.failed { border-color: var(--bad); }
.warning { margin-top: 12px; }
footer { margin-top: 40px; }
"""

SORT = """
for (const table of document.querySelectorAll('.wide table')) {
  const heads = [...table.querySelectorAll('thead th')];
  heads.forEach((th, i) => {
    const button = document.createElement('button');
    button.textContent = th.textContent;
    th.replaceChildren(button);
    button.onclick = () => {
      const down = th.getAttribute('aria-sort') === 'ascending';
      const key = row => { const td = row.cells[i]; const n = td.dataset.n;
        return n === undefined ? td.textContent : Number(n); };
      const full = row => row.cells[i].textContent !== '';
      const rows = [...table.tBodies[0].rows];
      const known = rows.filter(full).sort((a, b) => { const x = key(a), y = key(b);
        return typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y)); });
      if (down) known.reverse();
      heads.forEach(other => other.removeAttribute('aria-sort'));
      th.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      table.tBodies[0].append(...known, ...rows.filter(row => !full(row)));
    };
  });
}
"""

ZOOM = """
for (const box of document.querySelectorAll('.graph')) {
  const svg = box.querySelector('svg'), bar = box.parentElement.querySelector('.by');
  const whole = svg.viewBox.baseVal.width;
  let scale = 1, from = null, moved = false;
  const zoom = (to, x = box.clientWidth / 2, y = box.clientHeight / 2) => {
    to = Math.min(Math.max(to, 0.05), 4);
    const left = (box.scrollLeft + x) * to / scale - x, top = (box.scrollTop + y) * to / scale - y;
    svg.setAttribute('width', whole * to);
    scale = to;
    box.scrollTo(left, top);
  };
  const fit = () => zoom(Math.min(box.clientWidth / whole, 1), 0, 0);
  for (const [text, label, act] of [['+', 'Zoom in', () => zoom(scale * 1.4)],
      ['\\u2212', 'Zoom out', () => zoom(scale / 1.4)], ['fit', 'Whole graph', fit]]) {
    const button = document.createElement('button');
    button.textContent = text;
    button.ariaLabel = label;
    button.onclick = act;
    bar.append(button);
  }
  box.addEventListener('wheel', event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const place = box.getBoundingClientRect();
    zoom(scale * Math.exp(-event.deltaY / 300), event.clientX - place.left, event.clientY - place.top);
  }, { passive: false });
  box.addEventListener('mousedown', event => {
    from = [event.clientX + box.scrollLeft, event.clientY + box.scrollTop];
    moved = false;
    event.preventDefault();
  });
  box.addEventListener('click', event => { if (moved) event.preventDefault(); }, true);
  addEventListener('mousemove', event => {
    if (!from) return;
    moved = true;
    box.classList.add('drag');
    box.scrollTo(from[0] - event.clientX, from[1] - event.clientY);
  });
  addEventListener('mouseup', () => { from = null; box.classList.remove('drag'); });
  if (box.clientWidth > 700) fit();
}
"""
