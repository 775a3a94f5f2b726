// What surrounds a component: perturbations of the model along it, and what it is in other decompositions.
"use strict";

const linkTo = (d, j) => `#/d/${encodeURIComponent(run.decompositions[d].name)}/c/${j}`;
const compareLink = (a, b) => `#/compare/${[a, b].map((d) => encodeURIComponent(run.decompositions[d].name)).join("/")}`;
const treeLink = (d, j) => `#/tree/${encodeURIComponent(run.decompositions[d].name)}${j === undefined ? "" : `/${j}`}`;
const inChain = (d) => run.chains.some((chain) => chain.includes(d));
const times = (value) => (!Number.isFinite(value) ? "–" : Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(3))));
const between = (ends, joint = " to ") => (ends ? ends.map(times).join(joint) : "–");
const similar = (value) => (!Number.isFinite(value) ? "–" : value.toFixed(2));

componentSections.side.splice(0, 0, perturbationSection);
componentSections.side.splice(3, 0, seedSection, methodsSection, parentSection, splitSection);
overviewSections.push(perturbationsOverview, pairsOverview);

// --- perturbations ------------------------------------------------------------------------------------------------

const chosenPerturbation = {}; // name that the reader chose last, per decomposition
const FLATTERS = "In-sample: the examples that are measured also made the component and the direction of the change, which acts on them more than on new examples of the same kind. So the ratio flatters; that of random groups of examples is large for the same reason.";

const sampleBadge = ({ protocol }) => el("span", { class: protocol === "heldout" ? "badge sample" : "badge insample", title: WORDS[protocol === "heldout" ? "held-out" : "in-sample"] }, protocol === "heldout" ? "held-out" : "in-sample");
const isNone = ({ ratio, limit }) => limit !== null && !(ratio > limit);

function perturbationSection(page, { d }) {
  const all = page.perturbations;
  if (!all.length) return null;
  const measured = el("div"), where = el("div");
  const show = (found) => { measured.replaceChildren(...perturbationBody(found)); where.replaceChildren(...whereBody(found)); };
  const start = Math.max(0, all.findIndex((found) => found.about.name === chosenPerturbation[d.name])); // held-out ones are first
  const tabs = all.map((found, n) => el("button", { type: "button", "aria-pressed": String(n === start), onclick: () => {
    chosenPerturbation[d.name] = found.about.name;
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === n)));
    show(found);
  } }, found.about.name));
  show(all[start]);
  return [
    el("section", { id: "perturbed" }, el("h2", {}, "Perturbed"), all.length > 1 ? el("div", { class: "tabs", role: "group", "aria-label": "Perturbation" }, tabs) : null, measured),
    el("section", { id: "where" }, el("h2", {}, "Where it lives"), where),
  ];
}

function perturbationBody({ about, record, limit, others }) {
  const { best, fidelity } = record, { summary, parts } = about, heldOut = summary.protocol === "heldout";
  const points = record.curve.map(({ magnitude, ratio }) => [magnitude, ratio]).filter((point) => point.every(Number.isFinite));
  const orders = new Set([best, ...record.tried].map((one) => one.order)).size > 1;
  const signed = (one) => (one.sign > 0 ? "+" : "−") + (orders ? ` ${one.order}` : "");
  const before = (pair) => (pair ? `${percent(pair[0], 0)} → ${percent(pair[1], 0)}` : "–");
  const of = (count) => (count ? ` of ${count}` : "");
  const prompts = best.elsewhere.filter(({ text }) => text !== "running text");
  const damage = (text) => best.elsewhere.filter((one) => one.text === text).map(({ kl }) => `${times(kl)} (${percent(kl / best.top_kl)} of the top)`)[0];
  // word, title, what a column says; lines that say nothing are left out
  const lines = [
    ["KL ratio", "KL ratio", (one) => times(one.ratio)], ["95% interval", "95% interval", (one) => one.interval && between(one.interval)],
    ["random groups", "random groups, 95% of them", () => summary.null && (summary.null.single ? between(summary.null.single) : `${times(summary.null.ratio)} (too few to tell)`)],
    ["permuted coefficients", "permuted coefficients, 95%", (one) => one.permuted && `${between([one.permuted.low, one.permuted.high])}, p = ${Number(one.permuted.p.toPrecision(2))}`],
    ["predicted to second order", "predicted to second order", (one) => one.predicted_ratio && times(one.predicted_ratio)],
    ["KL of top examples", "KL of top examples", (one) => times(one.top_kl)], ["KL of the next in rank", "KL of the next in rank", (one) => times(one.related_kl)],
    ["KL of random examples", "KL of random examples", (one) => times(one.random_kl)],
    ["damage elsewhere", "KL a token of running text", () => damage("running text")], ...prompts.map(({ text }) => ["damage elsewhere", `KL on prompts of ${text}`, () => damage(text)]),
    ["flipped", "flipped of the top", (one) => `${one.flipped.top}${of(best.top.length)}`], ["flipped", "flipped of random ones", (one) => `${one.flipped.random}${of(others)}`],
    ["accuracy", "accuracy on the top", (one) => before(one.accuracy.top)], ["accuracy", "accuracy on random ones", (one) => before(one.accuracy.random)],
    ["norm ratio", "norm ratio", (one) => times(one.norm_ratio)], ["length of the change", "length of the change", (one) => times(one.magnitude)],
  ];
  const verdict = limit === null ? "not compared with chance" : isNone({ ratio: best.ratio, limit }) ? "no effect above chance" : "above chance";
  const which = heldOut ? "held-out examples" : "examples";
  return [
    el("p", {}, sampleBadge(summary), what(heldOut ? "held-out" : "in-sample"), " ", el("span", { class: `badge ${verdict === "above chance" ? "above" : "none"}` }, verdict), " ", what("above chance")),
    el("p", {}, el("b", { class: "large" }, `${times(best.ratio)}×`), best.interval ? ` (${between(best.interval)})` : "",
      ` as much change in the top ${which} of this component as in other ${which}`,
      el("span", { class: "quiet" }, ` (KL ${times(best.top_kl)} against ${times(best.random_kl)}). ${limit === null ? "" : `Chance alone gives up to ${times(limit)}. `}Any change moves them ${times(best.norm_ratio)}× as much as others (norm ratio).`)),
    heldOut ? null : el("p", { class: "small" }, FLATTERS),
    el("div", { class: "scroll" }, el("table", { class: "tight" },
      el("thead", {}, el("tr", {}, el("td", {}, worded("sign")), el("th", { scope: "col", class: "number" }, signed(best)))),
      el("tbody", {}, lines.filter(([, , said]) => said(best)).map(([word, title, said]) => el("tr", {}, el("th", { scope: "row" }, worded(word, title)), el("td", { class: "number" }, said(best))))))),
    record.tried.length ? el("p", { class: "quiet small" }, `Tried ${heldOut ? "on the tune part" : "first"}: ${record.tried.map((one) => `${signed(one)} ratio ${times(one.ratio)}`).join(", ")}. `) : null,
    partsLine(parts, best.top.length, others),
    el("p", { class: "quiet small" }, `${about.name}: direction ${about.direction} `, what("direction"), `, ${about.way}, compared at ${about.at}; fidelity ${similar(fidelity)} `, what("fidelity")),
    points.length > 1 ? [el("h3", {}, "Ratio against length of the change"), ratioCurve(points)] : null,
  ].flat().filter(Boolean);
}

function partsLine(parts, top, others) {
  if (parts.fit === undefined) return null;
  return el("p", { class: "quiet small" }, `Examples: ${number(parts.fit)} fit, ${number(parts.tune)} tune, ${number(parts.test)} test `, what("fit, tune, test"),
    `; measured are ${top} top and ${others} others of the test part.`);
}

function ratioCurve(points) {
  const width = 420, height = 200, left = 46, bottom = 26, top = 10, right = 14;
  const [lengths, ratios] = [0, 1].map((n) => points.map((point) => Math.log10(Math.max(point[n], 1e-12))));
  const scale = (values, low, high) => { const least = Math.min(...values), span = Math.max(...values) - least || 1; return (value) => low + ((value - least) / span) * (high - low); };
  const x = scale(lengths, left + 6, width - right), y = scale(ratios, height - bottom - 6, top);
  const label = (n) => times(10 ** n);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `KL ratio at ${points.map(([length, ratio]) => `length ${times(length)}: ${times(ratio)}`).join(", ")}` },
    svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }),
    svg("line", { class: "axis", x1: left, x2: left, y1: top, y2: height - bottom }),
    [Math.min(...ratios), Math.max(...ratios)].map((n) => svg("text", { x: left - 4, y: y(n) + 4, "text-anchor": "end" }, label(n))),
    svg("text", { x: left + 6, y: height - 8 }, label(Math.min(...lengths))),
    svg("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `length ${label(Math.max(...lengths))}`),
    svg("path", { class: "curve", d: lengths.map((length, n) => `${n ? "L" : "M"}${x(length).toFixed(1)} ${y(ratios[n]).toFixed(1)}`).join("") }),
    lengths.map((length, n) => svg("circle", { class: "column", cx: x(length).toFixed(1), cy: y(ratios[n]).toFixed(1), r: 3.5 },
      svg("title", {}, `length ${times(points[n][0])}: ratio ${times(points[n][1])}`))));
  drawn.csv = () => [["length", "KL ratio"], ...points];
  return drawn;
}

// --- where it lives -----------------------------------------------------------------------------------------------

function whereBody(found) {
  const said = el("p", { class: "small", "aria-live": "polite" });
  return [
    heatMap(found.heat, (text) => { said.textContent = text; }),
    said,
    el("p", { class: "quiet small" }, "Part of the squared length of the change, by layer and kind of module. Point at a cell, or use the arrow keys."),
    found.record.largest.length ? el("details", {}, el("summary", {}, `The ${found.record.largest.length} largest entries`),
      el("div", { class: "scroll" }, el("table", { class: "tight" },
        el("thead", {}, el("tr", {}, ["parameter", "index", "value"].map((title, n) => el("th", { scope: "col", class: n ? "number" : "" }, title)))),
        el("tbody", {}, found.record.largest.map(({ parameter, index, value }) => el("tr", {},
          el("td", {}, parameter), el("td", { class: "number" }, index.join(", ")), el("td", { class: "number" }, times(value)))))))) : null,
  ].filter(Boolean);
}

// The shortest ends of module names that still tell them apart.
function shortNames(names) {
  for (let parts = 1; parts < 6; parts++) {
    const short = names.map((name) => name.split(/\.(?=\w)/).slice(-parts).join("."));
    if (new Set(short).size === names.length) return short;
  }
  return names;
}

function heatMap({ layers, kinds, shares }, say) {
  const width = 420, left = 34;
  const names = shortNames(kinds);
  const longest = Math.max(...names.map((name) => name.length));
  const slanted = longest * 6.2 > (width - left) / kinds.length;
  const right = slanted ? 6 + 3 * names[names.length - 1].length : 6, step = (width - left - right) / kinds.length;
  const top = slanted ? 14 + longest * 4.6 : 20, tall = Math.max(7, Math.min(18, 400 / layers.length)), bottom = 34;
  const height = top + layers.length * tall + bottom;
  const largest = Math.max(...shares.flat(), 1e-12);
  const place = (r, c) => `${layers[r] < 0 ? "outside the blocks" : `layer ${layers[r]}`} · ${kinds[c]}: ${percent(shares[r][c], 2)}`;
  const flat = shares.flatMap((row, r) => row.map((share, c) => [share, r, c]));
  const most = flat.reduce((a, b) => (b[0] > a[0] ? b : a));
  const every = Math.ceil(13 / tall);
  const cells = flat.map(([share, r, c]) => svg("rect", { class: "cell", x: (left + c * step).toFixed(1), y: (top + r * tall).toFixed(1), width: Math.max(step - 1, 1).toFixed(1), height: Math.max(tall - 1, 1).toFixed(1), "fill-opacity": (share / largest).toFixed(3), "data-at": `${r} ${c}` }, svg("title", {}, place(r, c))));
  const cursor = svg("rect", { class: "cursor", width: step.toFixed(1), height: tall.toFixed(1), visibility: "hidden" });
  let at = most.slice(1);
  const point = (r, c) => {
    at = [r, c];
    cursor.setAttribute("x", (left + c * step - 0.5).toFixed(1));
    cursor.setAttribute("y", (top + r * tall - 0.5).toFixed(1));
    say(place(r, c));
  };
  const rest = () => { cursor.setAttribute("visibility", "hidden"); say(`most in ${place(...most.slice(1))}`); };
  const ways = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const legend = [0, 0.2, 0.4, 0.6, 0.8, 1];
  const drawn = svg("svg", {
    class: "heat", viewBox: `0 0 ${width} ${height.toFixed(0)}`, role: "img", tabindex: "0", "aria-label": `Heat map of ${layers.length} layers and ${kinds.length} columns; most in ${place(...most.slice(1))}`,
    onpointerover: (event) => { const found = event.target.closest(".cell"); if (found) point(...found.dataset.at.split(" ").map(Number)); },
    onpointerleave: rest, onblur: rest,
    onfocus: () => { cursor.setAttribute("visibility", "visible"); point(...at); },
    onkeydown: (event) => {
      const way = ways[event.key];
      if (!way) return;
      event.preventDefault();
      event.stopPropagation(); // these keys turn pages elsewhere
      point(Math.max(0, Math.min(layers.length - 1, at[0] + way[0])), Math.max(0, Math.min(kinds.length - 1, at[1] + way[1])));
    },
  },
  names.map((name, c) => {
    const x = left + (c + 0.5) * step;
    return svg("text", slanted ? { x, y: top - 6, transform: `rotate(-45 ${x.toFixed(1)} ${top - 6})` } : { x, y: top - 6, "text-anchor": "middle" }, name);
  }),
  layers.map((layer, r) => (r % every ? null : svg("text", { x: left - 6, y: top + (r + 0.5) * tall + 4, "text-anchor": "end" }, layer < 0 ? "–" : layer))),
  svg("rect", { class: "frame", x: left - 1, y: top - 1, width: width - left - right + 1, height: layers.length * tall + 1 }),
  cells, cursor,
  svg("text", { x: left, y: height - 8 }, "0%"),
  legend.map((share, n) => svg("rect", { class: "cell", x: left + 24 + n * 22, y: height - 18, width: 22, height: 12, "fill-opacity": share })),
  svg("text", { x: left + 30 + legend.length * 22, y: height - 8 }, percent(largest, largest < 0.1 ? 1 : 0)));
  drawn.csv = () => [["layer", "module", "share"], ...flat.map(([share, r, c]) => [layers[r], kinds[c], share])];
  rest();
  return drawn;
}

// --- in other decompositions --------------------------------------------------------------------------------------

// An entry's item: component, similarity of coefficients, of vectors, three tunings, prediction, first example.
function relative(other, [k, coefficients, vectors, prediction, label, lnp, most, text]) {
  return el("li", {}, el("a", { href: linkTo(other, k) }, `Component ${k}`), " ", badges({ prediction, label, lnp }),
    el("div", { class: "facts" }, el("span", { title: "|cos| of coefficients over all examples" }, bar(coefficients), ` coefficients ${similar(coefficients)}`), vectors === null ? null : el("span", { title: "|cos| of the components themselves" }, `vectors ${similar(vectors)}`),
      most ? el("span", { class: "chip", dir: "auto" }, visible(most)) : null),
    el("span", { class: "quiet small one-line", dir: "auto" }, visible(text)));
}

function relationSection(id, title, entries, context, more) {
  if (!entries.length) return null;
  const own = run.decompositions.indexOf(context.d);
  return el("section", { id }, el("h2", {}, worded("similarity of coefficients", title)), more,
    entries.map((entry) => [
      el("h3", { class: "ends" }, el("span", {}, el("a", { href: `#/d/${encodeURIComponent(run.decompositions[entry.other].name)}` }, run.decompositions[entry.other].name),
        entry.kind === "splits" ? el("span", { class: "quiet" }, ` ${entry.count} split${entry.count === 1 ? "" : "s"}`) : null), el("a", { class: "small", href: compareLink(own, entry.other) }, "compare")),
      entry.items.length ? el("ul", { class: "list" }, entry.items.map((item) => relative(entry.other, item))) : el("p", { class: "quiet small" }, "nothing like it"),
      entry.count > entry.items.length ? el("p", { class: "quiet small" }, `and ${entry.count - entry.items.length} more`) : null,
      entry.by_components && entry.items.length && entry.by_components[0] !== entry.items[0][0]
        ? el("p", { class: "quiet small" }, "By vectors it is matched with ", el("a", { href: linkTo(entry.other, entry.by_components[0]) }, `component ${entry.by_components[0]}`), ` (${similar(entry.by_components[2])}).`) : null,
    ]));
}

function seedSection(page, context) {
  const seeds = page.relations.filter((entry) => entry.kind === "match" && run.decompositions[entry.other].method === context.d.method);
  const mean = context.table.stability ? context.table.stability[context.j] : null;
  return relationSection("seeds", "In other seeds", seeds, context, mean === null ? null : el("p", {}, el("b", { class: "large" }, similar(mean)),
    el("span", { class: "quiet" }, ` mean similarity with its match in ${seeds.length} other decomposition${seeds.length === 1 ? "" : "s"} of this method and count`)));
}

function methodsSection(page, context) {
  return relationSection("others", "By other methods", page.relations.filter((entry) => entry.kind === "match" && run.decompositions[entry.other].method !== context.d.method), context);
}

const treeHint = ({ d, j }) => (inChain(run.decompositions.indexOf(d)) ? el("p", {}, el("a", { href: treeLink(run.decompositions.indexOf(d), j) }, "Its family in the split tree")) : null);

function parentSection(page, context) {
  return relationSection("parents", "Parents: with fewer components", page.relations.filter((entry) => entry.kind === "parent"), context, treeHint(context));
}

function splitSection(page, context) {
  return relationSection("splits", "Splits: with more components", page.relations.filter((entry) => entry.kind === "splits"), context, treeHint(context));
}

// --- on the overview ----------------------------------------------------------------------------------------------

function perturbationsOverview(d, { table }) {
  const lines = table.perturbations;
  if (!lines.length) return perturbedElsewhere();
  const withNull = ({ null: none }, said) => (none ? said(none) : "–");
  const heads = [ // title, class of the cells, what a line says, word that explains it
    ["name", "", ({ name }) => name], ["measured on", "", ({ summary }) => sampleBadge(summary), "held-out"],
    ["components", "number", ({ summary }) => summary.components],
    ["above chance", "number", ({ summary }) => (summary.above_null === null ? "–" : `${summary.above_null} of ${summary.components}`)],
    ["KL ratio", "number", ({ summary }) => times(summary.kl_ratio)], ["95% interval", "number", ({ summary }) => between(summary.interval)],
    ["random groups", "number", ({ summary }) => withNull(summary, (none) => times(none.ratio))],
    ["95% of them", "number", ({ summary }) => withNull(summary, (none) => between(none.single)), "random groups"],
    ["running text ÷ top", "number", ({ summary }) => (summary.elsewhere === null ? "–" : tiny(summary.elsewhere)), "damage elsewhere"],
    ["norm ratio", "number", ({ summary }) => times(summary.norm_ratio)],
    ["fit, tune, test", "number", ({ parts }) => ["fit", "tune", "test"].map((part) => number(parts[part]) ?? "–").join(", ")],
    ["direction", "", (line) => line.direction], ["way", "", (line) => line.way], ["compared at", "", (line) => line.at],
    ...(lines.some(({ summary }) => summary.predicted_ratio !== null) ? [["predicted to second order", "number", ({ summary }) => times(summary.predicted_ratio)]] : []),
  ];
  return [el("h2", {}, "Perturbations"),
    el("div", { class: "scroll" }, el("table", { id: "perturbations" },
      el("thead", {}, el("tr", {}, heads.map(([title, kind, , word = title]) => el("th", { scope: "col", class: kind }, WORDS[word] ? worded(word, title) : title)))),
      el("tbody", {}, lines.map((line) => el("tr", {}, heads.map(([, kind, said], n) => el(n ? "td" : "th", n ? { class: kind } : { scope: "row" }, said(line)))))))),
    el("p", { class: "quiet small" }, "Geometric means over the components that were perturbed."),
    lines.some(({ summary }) => summary.protocol !== "heldout") ? el("p", { class: "small" }, FLATTERS) : null];
}

// Where perturbations are, on the overview of a decomposition that has none.
function perturbedElsewhere() {
  const others = run.decompositions.filter((other) => other.perturbed);
  if (!others.length) return null;
  return [el("h2", {}, "Perturbations"), el("p", { id: "elsewhere" }, "No component of this decomposition was perturbed. There are perturbations of ",
    others.map((other, n) => [n ? ", " : "", el("a", { href: `#/d/${encodeURIComponent(other.name)}` }, other.name), ` (${other.perturbed} component${other.perturbed === 1 ? "" : "s"})`]), ".")];
}

function pairsOverview(d) {
  const own = run.decompositions.indexOf(d);
  const lines = run.pairs.filter((pair) => pair.first === own || pair.second === own);
  if (!lines.length) return null;
  return [el("h2", {}, "Compared with other decompositions"),
    pairTable(lines.map((line) => [own, line.first === own ? line.second : line.first, line])),
    inChain(own) ? el("p", {}, el("a", { href: treeLink(own) }, "Split tree")) : null];
}

// Lines [a, b, pair] of the run's pairs.
function pairTable(lines) {
  const heads = [["compare", ""], ["components", "number"], ["coefficients", "number", "similarity of coefficients"], ["vectors", "number", "similarity of vectors"], ["splits keep their prediction", "number", "splits that keep their prediction"]];
  return el("div", { class: "scroll" }, el("table", { class: "pairs" },
    el("thead", {}, el("tr", {}, heads.map(([title, kind, word = title]) => el("th", { scope: "col", class: kind }, WORDS[word] ? worded(word, title) : title)))),
    el("tbody", {}, lines.map(([a, b, line]) => el("tr", {},
      el("td", {}, el("a", { href: compareLink(a, b) }, `${run.decompositions[a].name} and ${run.decompositions[b].name}`)),
      el("td", { class: "number" }, `${run.decompositions[a].components} and ${run.decompositions[b].components}`),
      el("td", { class: "number" }, bar(line.coefficients), ` ${similar(line.coefficients)}`), el("td", { class: "number" }, similar(line.components)),
      el("td", { class: "number" }, line.splits ? `${line.kept} of ${line.splits}` : "–"))))));
}
