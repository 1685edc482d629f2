"""CSS and the one script of the HTML report."""

CSS = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c2024; --soft: #60646c; --line: #d9dce0; --panel: #f6f7f8;
  --bar: #2f6fb3; --good: #18794e; }
@media (prefers-color-scheme: dark) { :root { --page: #15181b; --ink: #e8eaed; --soft: #a0a6ad; --line: #363b41;
  --panel: #1e2226; --bar: #6ea8e0; --good: #4cc38a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1100px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 22px; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 0 0 8px; max-width: 75ch; }
ul { padding-left: 20px; }
li { overflow-wrap: anywhere; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
code { background: var(--panel); padding: 1px 4px; border-radius: 3px; }
pre { background: var(--panel); padding: 12px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px; margin: 0; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px; }
.tile dt, .tile p, footer { color: var(--soft); font-size: 13px; margin: 0; }
.tile dd { margin: 0; font-size: 17px; font-weight: 600; }
.chart { display: block; }
.chart text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.chart tspan { fill: var(--soft); }
.chart rect { fill: var(--bar); }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: 13px; }
.wide table { width: 100%; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
.wide tr:last-child td { border-bottom: 0; }
thead th { background: var(--panel); }
td[data-n] { font-variant-numeric: tabular-nums; }
thead th button { all: unset; cursor: pointer; }
thead th button:focus-visible { outline: 2px solid var(--bar); }
.facts th { font-weight: 600; vertical-align: top; }
.facts td { white-space: normal; overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; }
footer { margin-top: 40px; }
"""

SORT = """
for (const table of document.querySelectorAll('.wide table')) {
  table.querySelectorAll('thead th').forEach((th, i) => {
    const button = document.createElement('button');
    button.textContent = th.textContent;
    th.replaceChildren(button);
    let down = false;
    button.onclick = () => {
      const key = row => { const td = row.cells[i]; const n = td.dataset.n;
        return n === undefined ? (td.textContent ? td.textContent : '\\uffff') : Number(n); };
      const rows = [...table.tBodies[0].rows].sort((a, b) => { const x = key(a), y = key(b);
        return typeof x === 'number' && typeof y === 'number' ? x - y : String(x).localeCompare(String(y)); });
      if (down) rows.reverse();
      down = !down;
      table.tBodies[0].append(...rows);
    };
  });
}
"""
