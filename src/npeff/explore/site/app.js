// The page of a run. Data files are scripts that call npeffData(key, value), so that it works from disk as well.
// Every text of the data set reaches the page as a text node (see `el`), never as markup.
"use strict";

// --- data ---------------------------------------------------------------------------------------------------------

const waiting = new Map(); // key → {promise, resolve}

function npeffData(key, value) {
  if (waiting.has(key)) waiting.get(key).resolve(value);
}

function load(key) {
  if (!waiting.has(key)) {
    const entry = {};
    entry.promise = new Promise((resolve, reject) => {
      entry.resolve = resolve;
      const script = document.createElement("script");
      script.src = `data/${key}.js`;
      script.onload = () => script.remove();
      script.onerror = () => { script.remove(); waiting.delete(key); reject(new Error(`data/${key}.js is missing`)); };
      document.head.append(script);
    });
    waiting.set(key, entry);
  }
  return waiting.get(key).promise;
}

// --- small helpers ------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Control characters have no shape of their own: show the symbol for each (line breaks and tabs stay).
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421");
}
const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)}%`);
const tiny = (value) => (value === 0 ? "0%" : value < 0.001 ? `${(100 * value).toPrecision(2)}%` : percent(value));
const number = (value) => (typeof value === "number" ? value.toLocaleString("en") : value);
const decimals = (value) => (value === 0 ? "0" : Math.abs(value) >= 0.001 ? value.toFixed(3) : value.toExponential(1));

function bar(share) {
  const inner = el("span");
  inner.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, inner);
}

const KINDS = { prediction: "prediction", label: "label", lnp: "LnP" };
const MEANING = {
  prediction: "all top examples have the same prediction",
  label: "all top examples have the same label",
  lnp: "all top examples have the same label, but not the same prediction",
};
function badges(flags) {
  if (flags.prediction === null) return el("span", { class: "badge none", title: "too few active examples" }, "too few");
  const shown = Object.keys(KINDS).filter((kind) => flags[kind] && !(kind === "label" && flags.lnp));
  if (!shown.length) return el("span", { class: "badge none" }, "not tuned");
  return shown.map((kind) => el("span", { class: `badge ${kind}`, title: MEANING[kind] }, KINDS[kind]));
}

// --- where we are -------------------------------------------------------------------------------------------------

let run = null;
let current = 0; // decomposition
const tables = {}; // state of each overview table: query, kind, sort, down

const home = () => `#/d/${encodeURIComponent(run.decompositions[current].name)}`;
const componentLink = (j) => `${home()}/c/${j}`;
const exampleLink = (i) => `${home()}/e/${i}`;

function parse(hash) {
  const parts = hash.replace(/^#\/?/, "").split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const found = run.decompositions.findIndex((d) => parts[0] === "d" && d.name === parts[1]);
  return { d: Math.max(found, 0), known: found >= 0 || !parts[0], view: parts[2] || "", argument: parts.slice(3).join("/") };
}

let drawn = 0;
async function draw() {
  const ticket = ++drawn;
  const place = parse(location.hash);
  current = place.d;
  const d = run.decompositions[current];
  $("pick").value = String(current);
  let content;
  try {
    if (!place.known) throw new Error("There is no such page.");
    if (place.view === "c") content = await componentView(d, Number(place.argument));
    else if (place.view === "e") content = await exampleView(d, Number(place.argument));
    else if (place.view === "search") content = searchView(place.argument, () => ticket === drawn);
    else if (place.view === "") content = await overview(d);
    else throw new Error("There is no such page.");
  } catch (error) {
    content = [el("h1", {}, "Not found"), el("p", {}, error.message), el("p", {}, el("a", { href: "#/" }, "To the overview"))];
  }
  if (ticket !== drawn) return; // the reader has gone on meanwhile
  $("main").replaceChildren(...[content].flat(3).filter(Boolean));
  document.title = `${$("main").querySelector("h1").textContent} · npeff`;
  window.scrollTo(0, 0);
  if (document.activeElement !== $("query")) $("main").focus({ preventScroll: true });
}

// --- overview -----------------------------------------------------------------------------------------------------

async function overview(d) {
  const table = await load(`${current}/components`);
  const cards = Object.keys(KINDS).map((kind) => {
    const rate = d.tunings[kind];
    if (!rate || rate.share === null) return null;
    return el("div", { class: "card", title: MEANING[kind] },
      el("span", { class: `badge ${kind}` }, `${KINDS[kind]}-tuned`),
      el("b", {}, percent(rate.share)),
      el("span", { class: "quiet small" }, `${rate.tuned} of ${rate.of}; 95%: ${percent(rate.low)} to ${percent(rate.high)}; by chance ${tiny(rate.expected)}`));
  });
  const explained = d.explained === null ? null : el("div", { class: "card" },
    el("span", { class: "quiet" }, "explained"), el("b", {}, percent(d.explained)),
    el("span", { class: "quiet small" }, "of an example on average, 1 − residual"));
  return [
    el("h1", {}, `${d.components} components`),
    el("p", { class: "quiet" }, `${d.name}: method ${d.method}. Tuned: the top ${d.top} ${d.unique ? "distinct texts" : "examples"} agree.`,
      d.left_out ? ` ${d.left_out} components with fewer active examples are left out of the shares.` : ""),
    el("div", { class: "cards" }, cards, explained),
    el("div", { class: "columns" },
      el("section", { class: "plot" }, el("h2", {}, "Map"), map(table),
        el("p", { class: "quiet small" }, "Near to each other: components with similar coefficients. Size: energy. ",
          [["prediction", "prediction-tuned"], ["both", "prediction and label"], ["lnp", "LnP-tuned"], ["none", "not tuned"]].map(([kind, title]) =>
            el("span", { class: "key" }, svg("svg", { class: "dot", viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("circle", { class: `point ${kind}`, cx: 5, cy: 5, r: 4 })), title)))),
      el("aside", {},
        el("section", {}, el("h2", {}, "Run"),
          el("dl", {}, run.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, visible(String(number(value))))]))),
        el("section", {}, el("h2", {}, "Loss per example"), d.losses.length > 1 ? curve(d.losses) : el("p", { class: "quiet" }, "No history."),
          d.verdict ? el("p", { class: "quiet small" }, d.verdict) : null))),
    el("h2", {}, "Components"),
    componentTable(d, table),
    run.decompositions.length > 1 ? [el("h2", {}, "All decompositions"), methodTable()] : null,
  ];
}

function methodTable() {
  const share = (rate) => el("td", { class: "number", title: rate ? `by chance ${tiny(rate.expected)}` : "" }, percent(rate ? rate.share : null));
  const heads = [["name", ""], ["method", ""], ["components", "number"], ["left out", "number"], ["prediction-tuned", "number"], ["label-tuned", "number"], ["LnP-tuned", "number"], ["explained", "number"]];
  return el("div", { class: "scroll" }, el("table", { id: "methods" },
    el("thead", {}, el("tr", {}, heads.map(([title, kind]) => el("th", { scope: "col", class: kind }, title)))),
    el("tbody", {}, run.decompositions.map((d) => el("tr", {},
      el("td", {}, el("a", { href: `#/d/${encodeURIComponent(d.name)}` }, d.name)), el("td", {}, d.method),
      el("td", { class: "number" }, String(d.components)), el("td", { class: "number" }, String(d.left_out)),
      Object.keys(KINDS).map((kind) => share(d.tunings[kind])), el("td", { class: "number" }, percent(d.explained)))))));
}

function componentTable(d, table) {
  const key = d.name;
  const state = tables[key] || (tables[key] = { query: "", kind: "all", sort: "energy", down: true, shown: 100 });
  const count = table.energy.length;
  const labelled = table.label_purity.some((value) => value !== null);
  const most = (counts) => counts.map(([name, n]) => `${name} ${n}`).join(", ");
  const haystack = Array.from({ length: count }, (_, j) => `${j} ${most(table.labels[j])} ${most(table.predictions[j])} ${table.first[j]}`.toLowerCase());
  const heads = [
    ["number", "component", "number"], ["tuned", "tuned", ""], ["energy", "energy", "number"], ["density", "density", "number"],
    ...(labelled ? [["label_purity", "label purity", "number optional"]] : []), ["prediction_purity", "prediction purity", "number optional"],
    ["first", "first example", "wide"],
  ];
  const value = {
    number: (j) => j,
    tuned: (j) => (table.lnp[j] ? 4 : 0) + (table.label[j] ? 2 : 0) + (table.prediction[j] ? 1 : 0) - (table.prediction[j] === null ? 1 : 0),
    first: (j) => table.first[j].toLowerCase(),
  };
  const of = (name) => value[name] || ((j) => (table[name][j] === null ? -1 : table[name][j]));
  const fits = {
    all: () => true, prediction: (j) => table.prediction[j], label: (j) => table.label[j], lnp: (j) => table.lnp[j],
    none: (j) => table.prediction[j] === false && !table.label[j], few: (j) => table.prediction[j] === null,
  };
  const body = el("tbody");
  const said = el("span", { class: "quiet", role: "status" });
  const more = el("button", { type: "button", onclick: () => { state.shown += 400; show(); } }, "Show more");
  const head = el("tr", {}, heads.map(([name, title, kind]) => el("th", { class: kind, scope: "col", "data-name": name },
    el("button", { type: "button", onclick: () => {
      state.down = state.sort === name ? !state.down : !["number", "first"].includes(name);
      state.sort = name;
      show();
    } }, title))));

  function show() {
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [];
    for (let j = 0; j < count; j++) if (fits[state.kind](j) && words.every((word) => haystack[j].includes(word))) rows.push(j);
    const by = of(state.sort);
    const sign = state.down ? -1 : 1;
    rows.sort((a, b) => { const x = by(a), y = by(b); return x < y ? -sign : x > y ? sign : a - b; });
    const largest = Math.max(...table.energy, 1e-12);
    body.replaceChildren(...rows.slice(0, state.shown).map((j) => el("tr", {},
      el("td", { class: "number" }, el("a", { href: componentLink(j) }, String(j))),
      el("td", {}, badges({ prediction: table.prediction[j], label: table.label[j], lnp: table.lnp[j] })),
      el("td", { class: "number" }, bar(table.energy[j] / largest), ` ${percent(table.energy[j], 2)}`),
      el("td", { class: "number" }, percent(table.density[j])),
      labelled ? el("td", { class: "number optional", title: most(table.labels[j]) }, percent(table.label_purity[j], 0)) : null,
      el("td", { class: "number optional", title: most(table.predictions[j]) }, percent(table.prediction_purity[j], 0)),
      el("td", { class: "wide" }, el("a", { class: "text small", dir: "auto", href: componentLink(j) }, visible(table.first[j]))))));
    for (const cell of head.children) {
      if (cell.dataset.name === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    said.textContent = `${rows.length} of ${count}`;
    more.hidden = rows.length <= state.shown;
  }

  const filter = el("input", { type: "search", id: "filter", placeholder: "Filter components", "aria-label": "Filter components",
    value: state.query, oninput: (event) => { state.query = event.target.value; show(); } });
  const titles = { all: "all", prediction: "prediction-tuned", label: "label-tuned", lnp: "LnP-tuned", none: "not tuned", few: "too few examples" };
  const kind = el("select", { id: "kind", "aria-label": "Tuning", onchange: (event) => { state.kind = event.target.value; show(); } },
    Object.entries(titles).map(([name, title]) => el("option", { value: name, selected: state.kind === name }, title)));
  show();
  return [el("div", { class: "tools" }, filter, kind, said), el("div", { class: "scroll" }, el("table", { id: "components" }, el("thead", {}, head), body)),
    el("p", {}, more)];
}

// --- one component ------------------------------------------------------------------------------------------------

async function componentView(d, j) {
  if (!Number.isInteger(j) || j < 0 || j >= d.components) throw new Error(`There is no component ${j} in ${d.name}.`);
  const [page, table] = await Promise.all([load(`${current}/component/${j}`), load(`${current}/components`)]);
  const flags = { prediction: page.prediction_tuned, label: page.label_tuned, lnp: page.lnp_tuned };
  const related = page.correlated.map((k, n) => [k, page.correlation[n]]).filter(([, r]) => Math.abs(r) >= 0.005);
  const lists = el("div");
  const cross = el("section");
  const tabs = page.orderings.map((ordering, n) => el("button", { type: "button", onclick: () => choose(n) }, ordering.order));
  function choose(n) {
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === n)));
    lists.replaceChildren(...exampleLists(page, page.orderings[n]));
    cross.replaceChildren(el("h2", {}, page.orderings[n].cross.labels ? "Label × prediction" : "Predictions"), crossTable(page.orderings[n].cross, d.top));
  }
  choose(0);
  return [
    el("div", { class: "title" }, el("h1", {}, `Component ${j}`), el("span", {}, badges(flags)),
      el("nav", { "aria-label": "Components" },
        j > 0 ? el("a", { href: componentLink(j - 1), rel: "prev" }, `← ${j - 1}`) : null,
        el("a", { href: home(), rel: "up" }, "all components"),
        j + 1 < d.components ? el("a", { href: componentLink(j + 1), rel: "next" }, `${j + 1} →`) : null)),
    el("p", { class: "quiet" }, `energy ${percent(page.energy, 2)} · active in ${percent(page.density)} of the examples`,
      page.quantiles.length ? ` · median coefficient ${decimals(page.quantiles[2])}, largest ${decimals(page.quantiles[6])}` : ""),
    el("div", { class: "columns" },
      el("div", {}, tabs.length > 1 ? el("div", { class: "tabs", role: "group", "aria-label": "Rank by" }, tabs) : null, lists),
      el("aside", {},
        cross,
        el("section", {}, el("h2", {}, "Coefficients"), columns(page.histogram),
          el("p", { class: "quiet small" }, `${number(page.histogram.zero)} examples with 0 not drawn`)),
        related.length ? el("section", {}, el("h2", {}, "Most correlated"), el("ul", { class: "list" }, related.map(([k, r]) => el("li", {},
          el("a", { href: componentLink(k) }, `Component ${k}`), ` ${r.toFixed(2)} `,
          badges({ prediction: table.prediction[k], label: table.label[k], lnp: table.lnp[k] }),
          el("span", { class: "quiet small one-line", dir: "auto" }, visible(table.first[k])))))) : null)),
  ];
}

function exampleLists(page, ordering) {
  if (!ordering.active) return [el("p", { class: "quiet" }, "No example has this component.")];
  return ordering.lists.flatMap((list, n) => {
    const title = n === 0 ? `Top ${list.examples.length} of ${number(ordering.active)} active examples`
      : `Lower down: from place ${number(list.place + 1)} (${percent(list.place / ordering.active, 0)} of the way)`;
    return [el("h2", {}, title), el("ol", { class: "list" }, list.examples.map((i, k) => exampleItem(i, page.shown[i],
      [`coefficient ${decimals(list.coefficients[k])}`, list.shares ? [bar(list.shares[k]), ` explains ${percent(list.shares[k])}`] : null])))];
  });
}

function exampleItem(i, [text, label, prediction, probability], more) {
  return el("li", {},
    el("a", { class: "text", dir: "auto", href: exampleLink(i) }, visible(text)),
    el("div", { class: "facts" }, answers(label, prediction, probability), more.filter(Boolean).map((part) => el("span", {}, part))));
}

function answers(label, prediction, probability) {
  const wrong = label !== null && label.trim().toLowerCase() !== prediction.trim().toLowerCase();
  return [
    label === null ? null : el("span", {}, "label ", el("span", { class: "chip", dir: "auto" }, visible(label))),
    el("span", {}, "predicted ", el("span", { class: wrong ? "chip wrong" : "chip", dir: "auto", title: wrong ? "not the label" : "" }, visible(prediction), wrong ? " ≠" : ""),
      ` ${percent(probability)}`),
  ];
}

function crossTable(cross, top) {
  const rows = cross.labels || [""];
  return el("div", {}, el("table", { class: "cross" },
    el("thead", {}, el("tr", {}, cross.labels ? el("td", { class: "quiet small" }, "label ↓ predicted →") : el("td"), cross.predictions.map((name) => el("th", { scope: "col", class: "number", dir: "auto" }, visible(name))))),
    el("tbody", {}, rows.map((name, r) => el("tr", {}, el("th", { scope: "row", dir: "auto" }, visible(name)),
      cross.predictions.map((_, c) => el("td", { class: "number" }, String(cross.top[r][c]), el("span", { class: "quiet small" }, ` / ${number(cross.active[r][c])}`))))))),
    el("p", { class: "quiet small" }, `in the top ${top} / among all active examples`));
}

// --- one example --------------------------------------------------------------------------------------------------

async function exampleView(d, i) {
  if (!Number.isInteger(i) || i < 0 || i >= run.examples) throw new Error(`There is no example ${i}.`);
  const block = Math.floor(i / run.block), at = i % run.block;
  const [texts, parts, table] = await Promise.all([load(`examples/${block}`), load(`${current}/examples/${block}`), load(`${current}/components`)]);
  const components = parts.components[at], coefficients = parts.coefficients[at], shares = parts.shares[at];
  const left = parts.residual[at];
  const stack = el("div", { class: "stack", role: "img", "aria-label": `Components explain ${percent(1 - left)} of this example` });
  (shares || []).forEach((share, n) => {
    const part = el("a", { href: componentLink(components[n]), tabindex: "-1", title: `component ${components[n]}: ${percent(share)}` });
    part.style.width = `${100 * Math.max(0, share)}%`;
    stack.append(part);
  });
  const fields = Object.entries(texts.fields).map(([name, values]) => [el("dt", {}, name), el("dd", { class: "text", dir: "auto" }, visible(values[at]))]);
  return [
    el("div", { class: "title" }, el("h1", {}, `Example ${number(i)}`),
      el("nav", { "aria-label": "Examples" },
        i > 0 ? el("a", { href: exampleLink(i - 1), rel: "prev" }, `← ${i - 1}`) : null,
        el("a", { href: home(), rel: "up" }, "all components"),
        i + 1 < run.examples ? el("a", { href: exampleLink(i + 1), rel: "next" }, `${i + 1} →`) : null)),
    el("div", { class: "card" }, el("div", { class: "text", dir: "auto", id: "example-text" }, visible(texts.text[at])),
      fields.length ? el("dl", {}, fields) : null,
      el("div", { class: "facts" }, answers(texts.label[at], texts.prediction[at], texts.probability[at]))),
    texts.aside[at] ? el("p", {}, `Set aside: ${texts.aside[at]}. No component describes it.`) : [
      el("h2", {}, "Which components explain it"),
      shares ? stack : null,
      el("p", { class: "quiet" }, `${percent(1 - left)} explained, ${percent(left)} left over; ${number(parts.used[at])} components are active`,
        parts.used[at] > components.length ? `, the largest ${components.length} are listed.` : "."),
      el("ul", { class: "list" }, components.map((j, n) => el("li", {},
        el("a", { href: componentLink(j) }, `Component ${j}`), " ", badges({ prediction: table.prediction[j], label: table.label[j], lnp: table.lnp[j] }),
        el("div", { class: "facts" }, el("span", {}, `coefficient ${decimals(coefficients[n])}`),
          shares ? el("span", {}, bar(shares[n]), ` explains ${percent(shares[n])}`) : null),
        el("span", { class: "quiet small text", dir: "auto" }, visible(table.first[j]))))),
    ],
  ];
}

// --- search -------------------------------------------------------------------------------------------------------

const MOST = 200;

function searchView(query, wanted) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const list = el("ol", { class: "list", id: "hits" });
  const said = el("p", { class: "quiet", role: "status" }, "Searching…");
  (async () => {
    let hits = 0;
    const blocks = Math.ceil(run.examples / run.block);
    for (let n = 0; n < blocks && words.length; n++) {
      const texts = await load(`examples/${n}`);
      if (!wanted()) return;
      texts.text.forEach((text, at) => {
        const low = text.toLowerCase();
        if (!words.every((word) => low.includes(word))) return;
        hits += 1;
        if (hits <= MOST) list.append(exampleItem(n * run.block + at, [text, texts.label[at], texts.prediction[at], texts.probability[at]], [`example ${n * run.block + at}`]));
      });
      said.textContent = `${number(hits)} found in ${number(Math.min(run.examples, (n + 1) * run.block))} of ${number(run.examples)} examples`;
    }
    said.textContent = `${number(hits)} of ${number(run.examples)} examples contain every word` + (hits > MOST ? `; the first ${MOST} are shown.` : ".");
  })().catch((error) => { said.textContent = error.message; });
  return [el("h1", {}, "Search"), el("p", {}, "Texts with ", el("span", { class: "chip", dir: "auto" }, visible(query))), said, list];
}

// --- charts -------------------------------------------------------------------------------------------------------

function map(table) {
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
        svg("title", {}, visible(`${j}: ${table.first[j]}`))))));
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

// --- start --------------------------------------------------------------------------------------------------------

function remember(name, value) { try { localStorage.setItem(name, value); } catch { /* not from every disk */ } }
function remembered(name) { try { return localStorage.getItem(name); } catch { return null; } }

function startTheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { document.documentElement.dataset.theme = remembered("npeff-theme") || (dark.matches ? "dark" : "light"); };
  dark.addEventListener("change", apply);
  $("theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember("npeff-theme", theme);
    document.documentElement.dataset.theme = theme;
  });
  apply();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const follow = (rel) => { const link = $("main").querySelector(`a[rel=${rel}]`); if (link) link.click(); };
  if (event.key === "/") { event.preventDefault(); $("query").focus(); }
  else if (event.key === "ArrowLeft") follow("prev");
  else if (event.key === "ArrowRight") follow("next");
  else if (event.key === "u") follow("up");
}

async function start() {
  startTheme();
  run = await load("run");
  const facts = Object.fromEntries(run.facts);
  $("run-name").textContent = visible(`${facts.task} · ${String(facts.model).split("/").pop()}`);
  $("pick").append(...run.decompositions.map((d, n) => el("option", { value: n }, d.name)));
  $("pick-box").hidden = run.decompositions.length < 2;
  $("pick").addEventListener("change", (event) => { current = Number(event.target.value); location.hash = home(); });
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const query = $("query").value.trim();
    if (/^\d+$/.test(query) && Number(query) < run.examples) location.hash = exampleLink(Number(query));
    else if (query) location.hash = `${home()}/search/${encodeURIComponent(query)}`;
  });
  document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); $("main").focus(); });
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", draw);
  await draw();
}

start().catch((error) => { $("main").replaceChildren(el("h1", {}, "Cannot show this run"), el("p", {}, error.message)); });
