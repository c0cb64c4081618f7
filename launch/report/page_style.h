#pragma once

#include <cstddef>
#include <string>

namespace megashard {

inline constexpr size_t kCurveColors = 8;

/// Style sheet of the page. Curves have the classes c0 to c7, with different colours on light and dark backgrounds.
inline constexpr const char* kPageStyle = R"(
:root { color-scheme: light dark; --ground: #fff; --text: #1c2128; --soft: #5d6773; --line: #d9dee4; --card: #f7f8fa;
  --k0: #2563c9; --k1: #c75c05; --k2: #20804a; --k3: #b8273b; --k4: #7440b5; --k5: #0b7480; --k6: #7f5325;
  --k7: #ad3684;
  --computes: #7fa8e0; --communicates: #d9730d; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --text: #e3e7ec; --soft: #9aa5b1; --line: #353c45;
  --card: #1c2127; --k0: #6ea8ff; --k1: #f2994a; --k2: #58c98a; --k3: #f27585; --k4: #b592f0; --k5: #4cc4d0;
  --k6: #cfa06b; --k7: #ea86c4; --computes: #4a74ad; --communicates: #f2994a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1500px; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 14px; margin: 0 0 4px; } p { margin: 4px 0 8px; } .soft { color: var(--soft); }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); }
.histories { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 600px), 1fr)); }
.card { position: relative; --ground: var(--card); background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 10px; min-width: 0; }
.wide { overflow-x: auto; background:
  linear-gradient(to right, var(--ground) 30%, transparent), linear-gradient(to left, var(--ground) 30%, transparent)
  right, linear-gradient(to right, var(--soft), transparent), linear-gradient(to left, var(--soft), transparent) right;
  background-size: 40px 100%, 40px 100%, 8px 100%, 8px 100%; background-repeat: no-repeat;
  background-attachment: local, local, scroll, scroll; } /* a shadow where there is more */
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 3px 14px 3px 0; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td { overflow-wrap: anywhere; min-width: 5em; } td:first-child { min-width: 9em; }
details { margin: 8px 0; } summary { cursor: pointer; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 6px 0 0; vertical-align: -1px; }
.keys span { margin-right: 16px; white-space: nowrap; }
svg { display: block; width: 100%; height: auto; } svg.trace { min-width: 760px; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg text.y { text-anchor: end; }
svg text.x { text-anchor: middle; } .grid { stroke: var(--line); } .curve { fill: none; stroke-width: 1.5; }
.restart { stroke: var(--soft); stroke-dasharray: 3 3; } .cursor { stroke: var(--soft); }
.computes { fill: var(--computes); background: var(--computes); }
.communicates { fill: var(--communicates); background: var(--communicates); }
.c0 { stroke: var(--k0); } .c1 { stroke: var(--k1); } .c2 { stroke: var(--k2); } .c3 { stroke: var(--k3); }
.c4 { stroke: var(--k4); } .c5 { stroke: var(--k5); } .c6 { stroke: var(--k6); } .c7 { stroke: var(--k7); }
circle { fill: var(--ground); }
.area { stroke: none; }
.area.c0 { fill: var(--k0); } .area.c1 { fill: var(--k1); } .area.c2 { fill: var(--k2); } .area.c3 { fill: var(--k3); }
.area.c4 { fill: var(--k4); } .area.c5 { fill: var(--k5); } .area.c6 { fill: var(--k6); } .area.c7 { fill: var(--k7); }
.key.c0, .part.c0 { background: var(--k0); } .key.c1, .part.c1 { background: var(--k1); }
.key.c2, .part.c2 { background: var(--k2); } .key.c3, .part.c3 { background: var(--k3); }
.key.c4, .part.c4 { background: var(--k4); } .key.c5, .part.c5 { background: var(--k5); }
.key.c6, .part.c6 { background: var(--k6); } .key.c7, .part.c7 { background: var(--k7); }
.bar { display: flex; height: 22px; border-radius: 4px; overflow: hidden; margin: 4px 0; background: var(--line); }
.reading { position: absolute; top: 10px; right: 10px; padding-left: 8px; font-size: 12px; color: var(--soft);
  background: var(--ground); }
)";

/// Shows the step and the values under the pointer in a chart.
inline constexpr const char* kPageScript = R"(
for (const svg of document.querySelectorAll('svg.chart')) {
  const [left, right, top, bottom] = svg.dataset.plot.split(' ').map(Number);
  const [first, last, least, most] = svg.dataset.range.split(' ').map(Number);
  const cursor = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  cursor.setAttribute('class', 'cursor'); cursor.setAttribute('y1', top); cursor.setAttribute('y2', bottom);
  const reading = svg.parentNode.querySelector('.reading');
  svg.addEventListener('pointerleave', () => { cursor.remove(); reading.textContent = ''; });
  svg.addEventListener('pointermove', (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    let at = null; const values = [];
    for (const curve of svg.querySelectorAll('polyline')) {
      let nearest = null;
      for (const point of curve.points)
        if (nearest === null || Math.abs(point.x - x) < Math.abs(nearest.x - x)) nearest = point;
      if (nearest === null || Math.abs(nearest.x - x) > 20) continue;
      if (at === null || Math.abs(nearest.x - x) < Math.abs(at - x)) at = nearest.x;
      const value = least + (bottom - nearest.y) / (bottom - top) * (most - least);
      values.push(curve.dataset.name + ' ' + Number(value.toPrecision(4)));
    }
    if (at === null) return;
    cursor.setAttribute('x1', at); cursor.setAttribute('x2', at); svg.append(cursor);
    const step = Math.round(first + (at - left) / (right - left) * (last - first));
    reading.textContent = 'step ' + step + ': ' + values.join(', ');
  });
}
)";

/// Escapes text from a file for HTML, within tags and quoted attributes; control characters become "?".
std::string html_text(const std::string& text);

/// A coordinate in a drawing, to two decimals: "12.5".
std::string place_text(double value);

}  // namespace megashard
