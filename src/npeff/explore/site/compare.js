// Two decompositions side by side, and the tree of splits from few components to many.
"use strict";

route("compare", compareView);
route("tree", treeView);

const SHOWN = 100;
// The overview table of a decomposition, with the themes of its components.
async function themedTable(d) {
  const [table, themes] = await Promise.all([tableOf(d), themesOf(run.decompositions[d])]);
  return { ...table, themes };
}
// Makes `d` the decomposition of the header, as the addresses of these pages begin with no decomposition.
function standAt(d) {
  current = d;
  $("pick").value = String(d);
}
const findDecomposition = (name) => {
  const found = run.decompositions.findIndex((d) => d.name === name);
  if (found < 0) throw new Error(`There is no decomposition ${name}.`);
  return found;
};

// --- two decompositions -------------------------------------------------------------------------------------------

async function compareView(d, argument) {
  if (!run.pairs.length) throw new Error("There is only one decomposition. `npeff decompose` with another seed, count or method gives something to compare.");
  const names = argument.split("/").filter(Boolean);
  const [a, b] = names.length === 2 ? names.map(findDecomposition) : [run.pairs[0].first, run.pairs[0].second];
  standAt(a);
  const pair = run.pairs.find((one) => (one.first === a && one.second === b) || (one.first === b && one.second === a));
  // both are read when one changes: the other may have been changed since this was drawn
  const chosenIn = (side) => Number($(`compare-${side}`).value);
  const pick = (chosen, side) => el("select", { id: `compare-${side}`, "aria-label": side === "a" ? "First decomposition" : "Second decomposition",
    onchange: () => { location.hash = compareLink(chosenIn("a"), chosenIn("b")); } }, run.decompositions.map((one, n) => el("option", { value: n, selected: n === chosen }, one.name)));
  const head = [
    el("div", { class: "title" }, el("h1", { "data-file": `compare ${run.decompositions[a].name} ${run.decompositions[b].name}` }, "Compare"), el("nav", { "aria-label": "Compare" }, el("a", { href: home(), rel: "up" }, "all components"), inChain(a) ? el("a", { href: treeLink(a) }, "split tree") : null)),
    el("div", { class: "tools" }, pick(a, "a"), el("span", { class: "quiet" }, "and"), pick(b, "b")),
  ];
  const all = run.pairs.length > 1 ? [el("h2", {}, "All pairs"), pairTable(run.pairs.map((one) => [one.first, one.second, one]))] : null;
  if (a === b) return [head, el("p", {}, "Choose two different decompositions."), all];
  if (!pair) return [head, el("p", {}, "These two were not compared: each decomposition is compared with the ones nearest to it."), all];
  const [found, ...tablesOf] = await Promise.all([load(`pair/${pair.first}-${pair.second}`), themedTable(a), themedTable(b)]);
  const sides = pair.first === a ? ["first", "second"] : ["second", "first"];
  const place = el("div");
  const ways = [["coefficients over all examples", found.matched], ...(found.by_components ? [["vectors, the components themselves", found.by_components]] : [])];
  const tabs = ways.map(([title], n) => el("button", { type: "button", onclick: () => choose(n) }, `by ${title}`));
  function choose(n) {
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === n)));
    place.replaceChildren(...[matchedTable(ways[n][1], sides, [a, b], tablesOf), unmatchedSection(pair, found, ways[n][1], [a, b], tablesOf)].flat(Infinity).filter(Boolean));
  }
  choose(0);
  return [head, pairCards(pair), tuningTable(a, b),
    el("h2", {}, "Matched components"),
    el("p", { class: "quiet" }, "One to one, so that the similarities add up to the most. ", what("similarity")),
    tabs.length > 1 ? el("div", { class: "tabs", role: "group", "aria-label": "Match by" }, tabs) : null,
    place, all];
}

function pairCards(pair) {
  const card = (word, title, value, about) => el("div", { class: "card" }, el("span", { class: "quiet" }, worded(word, title)), el("b", {}, value), el("span", { class: "quiet small" }, about));
  return el("div", { class: "cards" },
    card("similarity of coefficients", "coefficients", similar(pair.coefficients), "mean similarity of matched components"),
    pair.components === null ? null : card("similarity of vectors", "vectors", similar(pair.components), "the same, matched by the components themselves"),
    card("found again", "found again", similar(pair.best), "mean over all components of the largest similarity"),
    pair.splits ? card("splits that keep their prediction", "splits that keep their prediction", percent(pair.kept / pair.splits), `${pair.kept} of ${pair.splits} splits of prediction-tuned components`) : null);
}

function tuningTable(a, b) {
  const both = [a, b].map((n) => run.decompositions[n]);
  const share = (rate) => (rate && rate.share !== null ? [bar(rate.share), ` ${percent(rate.share)}`] : "–");
  const lines = [["method", (d) => d.method], ["seed", (d) => d.seed], ["components", (d) => number(d.components)], ["left out", (d) => number(d.left_out)],
    ...Object.keys(KINDS).map((kind) => [`${KINDS[kind]}-tuned`, (d) => share(d.tunings[kind])]), ["explained", (d) => percent(d.explained)]];
  return el("div", { class: "scroll narrow" }, el("table", { id: "tunings" },
    el("thead", {}, el("tr", {}, el("td"), both.map((d) => el("th", { scope: "col", class: "number" }, el("a", { href: `#/d/${encodeURIComponent(d.name)}` }, d.name))))),
    el("tbody", {}, lines.map(([title, of]) => el("tr", {}, el("th", { scope: "row" }, WORDS[title] ? worded(title) : title), both.map((d) => el("td", { class: "number" }, of(d))))))));
}

const componentCell = (d, table, j) => el("td", { class: "half" }, el("a", { href: linkTo(d, j) }, `Component ${j}`), " ", themeChip(table.themes.get(j)), badges(flagsOf(table, j)),
  el("span", { class: "quiet small text", dir: "auto" }, visible(table.first[j])));

// A table that shows its first rows and a button for more; `row(n)` makes one, `csv` gives all.
function longTable(id, heads, count, row, csv) {
  const body = el("tbody");
  const more = el("button", { type: "button", onclick: () => show(4 * SHOWN) }, "Show more");
  let shown = 0;
  function show(further) {
    const stop = Math.min(count, shown + further);
    for (; shown < stop; shown++) body.append(row(shown));
    more.hidden = shown >= count;
  }
  show(SHOWN);
  const table = el("table", { id }, el("thead", {}, el("tr", {}, heads.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)))), body);
  table.csv = csv;
  return [el("div", { class: "scroll" }, table), el("p", {}, more)];
}

function matchedTable(matched, [one, other], [a, b], [first, second]) {
  const names = [a, b].map((n) => run.decompositions[n].name);
  return longTable("matched", [["coefficients", "number"], ["vectors", "number optional"], [names[0], "half"], [names[1], "half"]], matched.first.length,
    (n) => el("tr", {}, el("td", { class: "number" }, bar(matched.coefficients[n]), ` ${similar(matched.coefficients[n])}`),
      el("td", { class: "number optional" }, matched.components ? similar(matched.components[n]) : "–"),
      componentCell(a, first, matched[one][n]), componentCell(b, second, matched[other][n])),
    () => [["coefficients", "vectors", ...names, ...names.map((name) => `${name}: first example`)], ...matched.first.map((_, n) => [
      matched.coefficients[n], matched.components ? matched.components[n] : "", matched[one][n], matched[other][n], first.first[matched[one][n]], second.first[matched[other][n]]])]);
}

// Of two decompositions with different counts the finer one has components without a partner: each has a parent.
function unmatchedSection(pair, found, matched, [a], tablesOf) {
  if (!found.parents) return null;
  const [coarse, fine] = pair.first === a ? tablesOf : [...tablesOf].reverse();
  const taken = new Set(matched.second);
  const left = found.parents.second.filter((k) => !taken.has(k));
  const parent = (k) => (found.parents.first[k] < 0 ? null : found.parents.first[k]), similarity = (k) => found.parents.coefficients[k];
  const names = [pair.first, pair.second].map((n) => run.decompositions[n].name);
  left.sort((x, y) => similarity(y) - similarity(x) || x - y);
  return [el("h2", {}, `Without a partner: ${number(left.length)} of ${names[1]}`),
    longTable("unmatched", [["coefficients", "number"], [names[1], "half"], [`most similar of ${names[0]}`, "half"]], left.length,
      (n) => el("tr", {}, el("td", { class: "number" }, bar(similarity(left[n])), ` ${similar(similarity(left[n]))}`),
        componentCell(pair.second, fine, left[n]),
        parent(left[n]) === null ? el("td", {}, "none is like it") : componentCell(pair.first, coarse, parent(left[n]))),
      () => [["coefficients", names[1], names[0]], ...left.map((k) => [similarity(k), k, parent(k) ?? ""])])];
}

// --- the tree of splits -------------------------------------------------------------------------------------------

const ALL_LEAVES = 150; // a tree with more is shown one family at a time

async function treeView(d, argument) {
  if (!run.chains.length) throw new Error("A tree needs decompositions of one method with different numbers of components. `npeff stability` makes them.");
  const [name, focus] = argument.split("/");
  const own = name ? findDecomposition(name) : run.chains[0][0];
  standAt(own);
  const chain = run.chains.find((one) => one.includes(own));
  if (!chain) throw new Error(`${name} has no neighbours with more or fewer components.`);
  const [tablesOf, pairs] = await Promise.all([
    Promise.all(chain.map(themedTable)),
    Promise.all(chain.slice(1).map((n, level) => load(`pair/${chain[level]}-${n}`))),
  ]);
  const roots = splitTree(chain, tablesOf, pairs);
  const all = roots.flatMap(everyNode);
  const leaves = all.filter((node) => !node.children.length).length;
  const here = all.find((node) => node.d === own && node.j === Number(focus) && focus !== undefined && focus !== "");
  const families = roots.filter((node) => node.children.length || node.level === 0);
  const byEnergy = [...families].sort((x, y) => y.energy - x.energy);
  const place = el("div", { class: "scroll" });
  const show = (value) => place.replaceChildren(drawTree(value === "all" ? roots : [families[Number(value)]], chain, here));
  const start = here ? String(families.findIndex((root) => everyNode(root).includes(here))) : leaves <= ALL_LEAVES ? "all" : String(families.indexOf(byEnergy[0]));
  const family = el("select", { id: "family", "aria-label": "Family", onchange: (event) => show(event.target.value) },
    el("option", { value: "all", selected: start === "all" }, `all ${number(all.length)} components`),
    families.map((root, n) => el("option", { value: n, selected: start === String(n) }, `${root.label}: ${everyNode(root).length - 1} below`)));
  const which = el("select", { id: "chain", "aria-label": "Decompositions", onchange: (event) => { location.hash = treeLink(run.chains[Number(event.target.value)][0]); } },
    run.chains.map((one, n) => el("option", { value: n, selected: one === chain }, one.map((m) => run.decompositions[m].name).join(" → "))));
  show(start);
  return [
    el("div", { class: "title" }, el("h1", {}, "Split tree"), el("nav", { "aria-label": "Tree" }, el("a", { href: home(), rel: "up" }, "all components"))),
    el("p", { class: "quiet" }, "With more components, general ones split into more specific ones. Each component hangs on the most similar one of the decomposition before it; the wider the line, the more similar their coefficients. A component without a theme is called by the ", tablesOf.some((table) => table.labels.some((counts) => counts.length)) ? "labels" : "predictions", " of its top examples."),
    el("div", { class: "tools" }, run.chains.length > 1 ? which : null, family),
    place, tuningLegend(),
  ];
}

const tuningOf = (table, j) => (table.lnp[j] ? "lnp" : table.label[j] ? "both" : table.prediction[j] ? "prediction" : "none");

function tuningLegend() {
  return el("p", { class: "quiet small" }, [["prediction", "prediction-tuned"], ["both", "prediction and label"], ["lnp", "LnP-tuned"], ["none", "not tuned"]].map(([kind, title]) =>
    el("span", { class: "key" }, svg("svg", { class: "dot", viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("circle", { class: `point ${kind}`, cx: 5, cy: 5, r: 4 })), title)));
}

// Nodes {d, j, level, children, similarity, ...}; returns those without a parent, coarse ones first.
function splitTree(chain, tablesOf, pairs) {
  const levels = chain.map((d, level) => tablesOf[level].energy.map((energy, j) => {
    const table = tablesOf[level], counts = table.labels[j].length ? table.labels[j] : table.predictions[j];
    const name = themeText(table.themes.get(j)) || visible(most(counts)).replace(/\s+/g, " ").trim();
    return { d, j, level, energy, children: [], similarity: null, kind: tuningOf(table, j), label: `${j} ${name}`.trim(), text: table.first[j] };
  }));
  const roots = [...levels[0]];
  pairs.forEach(({ parents }, n) => levels[n + 1].forEach((node) => {
    node.similarity = parents.coefficients[node.j];
    if (parents.first[node.j] >= 0) levels[n][parents.first[node.j]].children.push(node);
    else roots.push(node);
  }));
  levels.flat().forEach((node) => node.children.sort((x, y) => y.similarity - x.similarity));
  return roots;
}

const everyNode = (node) => [node, ...node.children.flatMap(everyNode)];

function drawTree(roots, chain, here) {
  // as wide as the window, so that labels have room for a few words of the first example
  const column = Math.max(190, Math.min(420, (Math.min(window.innerWidth, 1280) - 60) / chain.length));
  const row = 22, left = 14, top = 40, letter = 6.1, room = Math.floor((column - 70) / letter);
  let next = 0;
  const settle = (node) => {
    node.children.forEach(settle);
    node.y = node.children.length ? (node.children[0].y + node.children[node.children.length - 1].y) / 2 : top + row * next++;
  };
  roots.forEach(settle);
  const nodes = roots.flatMap(everyNode);
  const width = left + chain.length * column, height = top + row * next + 4;
  const x = (node) => left + node.level * column;
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const name = (node) => cut(node.label, room);
  const words = (node) => (room - name(node).length > 8 ? cut(visible(node.text).replace(/\s+/g, " "), room - name(node).length - 1) : "");
  const end = (node) => x(node) + 14 + letter * (name(node).length + (words(node) ? words(node).length + 1 : 0));
  const lines = nodes.flatMap((node) => node.children.map((child) => {
    const [from, to] = [Math.min(end(node), x(child) - 30), x(child) - 8], half = (from + to) / 2;
    return svg("path", { class: "branch", "stroke-width": (1 + 5 * child.similarity).toFixed(1), d: `M${from.toFixed(1)} ${node.y.toFixed(1)}C${half.toFixed(1)} ${node.y.toFixed(1)} ${half.toFixed(1)} ${child.y.toFixed(1)} ${to.toFixed(1)} ${child.y.toFixed(1)}` },
      svg("title", {}, `similarity ${similar(child.similarity)}`));
  }));
  const drawn = svg("svg", { id: "tree", class: "natural", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Tree of ${nodes.length} components over ${chain.length} decompositions` },
    chain.map((d, level) => svg("text", { class: "strong", x: left + level * column - 6, y: 16 }, cut(run.decompositions[d].name, room))),
    lines,
    nodes.map((node) => svg("a", { href: linkTo(node.d, node.j), class: node === here ? "here" : null },
      svg("circle", { class: `point ${node.kind}`, cx: x(node), cy: node.y.toFixed(1), r: 6 }),
      svg("text", { x: x(node) + 10, y: (node.y + 4).toFixed(1) }, name(node), words(node) ? svg("tspan", { class: "faint", dx: 6 }, words(node)) : null),
      svg("title", {}, `${run.decompositions[node.d].name}, component ${node.j}${node.similarity === null ? "" : `, similarity ${similar(node.similarity)}`}: ${visible(node.text)}`))));
  drawn.csv = () => [["decomposition", "component", "parent", "similarity"], ...nodes.flatMap((node) => node.children.map((child) => [run.decompositions[child.d].name, child.j, node.j, child.similarity]))];
  return drawn;
}
