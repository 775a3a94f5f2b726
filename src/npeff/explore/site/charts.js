// Drawings: the map of components, the loss curve, histograms.
"use strict";

function map(table, themes) {
  const width = 640, height = 480, edge = 14;
  const range = (values) => [Math.min(...values), Math.max(...values)];
  const [left, right] = range(table.x), [bottom, top] = range(table.y), largest = Math.max(...table.energy, 1e-12);
  const x = (value) => edge + ((value - left) / (right - left || 1)) * (width - 2 * edge);
  const y = (value) => height - edge - ((value - bottom) / (top - bottom || 1)) * (height - 2 * edge);
  const kind = (j) => (table.lnp[j] ? "lnp" : table.label[j] ? "both" : table.prediction[j] ? "prediction" : "none");
  const most = Math.max(3, Math.min(9, 120 / Math.sqrt(table.x.length)));
  // the table below is the way for keyboards: thousands of stops here would be in it
  return svg("svg", { id: "map", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Map of the components; the table below lists them" },
    table.x.map((_, j) => svg("a", { href: componentLink(j), tabindex: "-1" },
      svg("circle", { class: `point ${kind(j)}`, cx: x(table.x[j]).toFixed(1), cy: y(table.y[j]).toFixed(1), r: (most * (0.4 + 0.6 * Math.sqrt(table.energy[j] / largest))).toFixed(1) },
        svg("title", {}, `${j}: ${themeText(themes.get(j)) || visible(table.first[j])}`)))));
}

function curve(losses) {
  const width = 420, height = 200, left = 46, bottom = 24, top = 10, right = 10;
  const low = Math.min(...losses), high = Math.max(...losses), span = high - low || 1;
  const x = (n) => left + (n / (losses.length - 1)) * (width - left - right);
  const y = (loss) => top + ((high - loss) / span) * (height - top - bottom);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Loss from ${losses[0]} to ${losses[losses.length - 1]} in ${losses.length - 1} passes` },
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    svg("line", { class: "axis", x1: left, x2: left, y1: top, y2: height - bottom }),
    svg("text", { x: left - 4, y: y(high) + 4, "text-anchor": "end" }, high.toPrecision(3)),
    svg("text", { x: left - 4, y: y(low) + 4, "text-anchor": "end" }, low.toPrecision(3)),
    svg("text", { x: left, y: height - 8 }, "0"), svg("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `${losses.length - 1} passes`),
    svg("path", { class: "curve", d: losses.map((loss, n) => `${n ? "L" : "M"}${x(n).toFixed(1)} ${y(loss).toFixed(1)}`).join("") }));
}

function columns({ counts, edges }) {
  if (!counts.length) return el("p", { class: "quiet" }, "All coefficients are zero.");
  const width = 420, height = 170, left = 40, bottom = 22, top = 8, right = 8;
  const high = Math.max(...counts), step = (width - left - right) / counts.length;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Histogram of ${counts.reduce((a, b) => a + b, 0)} coefficients from ${edges[0]} to ${edges[counts.length]}` },
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    svg("text", { x: left - 4, y: top + 8, "text-anchor": "end" }, number(high)),
    svg("text", { x: left, y: height - 6 }, decimals(edges[0])),
    svg("text", { x: width - right, y: height - 6, "text-anchor": "end" }, decimals(edges[counts.length])),
    counts.map((count, n) => {
      const tall = (count / high) * (height - top - bottom);
      return svg("rect", { class: "column", x: (left + n * step + 0.5).toFixed(1), width: Math.max(step - 1, 1).toFixed(1), y: (height - bottom - tall).toFixed(1), height: tall.toFixed(1) },
        svg("title", {}, `${decimals(edges[n])} to ${decimals(edges[n + 1])}: ${number(count)}`));
    }));
}
