// The overview of a decomposition.
"use strict";

const tables = {}; // state of each table of components: query, kind, sort, down

route("", overview);

async function overview(d) {
  const [table, themes] = await Promise.all([tableOf(current), themesOf(d)]);
  const context = { d, table, themes };
  return [
    el("h1", {}, `${d.components} components`),
    el("p", { class: "quiet" }, `${d.name}: method ${d.method}. Tuned: the top ${d.top} ${d.unique ? "distinct texts" : "examples"} agree.`,
      d.left_out ? ` ${d.left_out} components with fewer active examples are left out of the percentages.` : ""),
    await Promise.all(overviewSections.map((section) => section(d, context))),
  ];
}

// Functions (decomposition, {d, table, themes}) → an element, a list of them, or null; scripts of other pages add theirs.
const overviewSections = [cardSection, startSection, mapSection, tableSection, methodSection];

function cardSection(d, { table }) {
  const cards = Object.keys(KINDS).map((kind) => {
    const rate = d.tunings[kind];
    if (!rate || rate.share === null) return null;
    return el("div", { class: "card" },
      el("span", { class: `badge ${kind}` }, `${KINDS[kind]}-tuned`), what(`${KINDS[kind]}-tuned`),
      el("b", {}, percent(rate.share)),
      el("span", { class: "quiet small" }, `${rate.tuned} of ${rate.of} components; 95% interval ${percent(rate.low)} to ${percent(rate.high)}; by chance ${tiny(rate.expected)} `, what("by chance")));
  });
  const explained = d.explained === null ? null : el("div", { class: "card" },
    el("span", { class: "quiet" }, worded("explained")), el("b", {}, percent(d.explained)),
    el("span", { class: "quiet small" }, "of an example, on average"));
  const recurring = d.recurrence_by_chance === null ? null : el("div", { class: "card", id: "recurring" },
    el("span", { class: "quiet" }, worded("recurrence", "recur")), el("b", {}, String(table.recurrence.filter((share) => share >= 0.5).length)),
    el("span", { class: "quiet small" }, `of ${d.components} components are found again by half or more of ${d.inputs.options.refits} other fits; by chance ${tiny(d.recurrence_by_chance)} `));
  return el("div", { class: "cards" }, cards, recurring, explained);
}

// The components to open first, as `npeff analyse` lists them.
function startSection(d, { table, themes }) {
  if (!table.highlights.length) return null;
  return [el("h2", {}, "Where to start"),
    el("p", { class: "quiet" }, table.recurrence ? "Components that other fits find again, " : "Components ", "whose top examples agree most, LnP-tuned ones first, and no two about the same examples. A component's page has its examples: what do they have in common?"),
    el("ul", { class: "list starts", id: "starts" }, table.highlights.map((j) => el("li", {},
      el("a", { href: componentLink(j) }, `Component ${j}`), " ", themeChip(themes.get(j)), badges(flagsOf(table, j)),
      el("div", { class: "facts" }, table.labels[j].length ? el("span", { dir: "auto" }, `labels ${visible(most(table.labels[j]))}`) : null,
        el("span", { dir: "auto" }, `predictions ${visible(most(table.predictions[j]))}`), table.effects && table.effects[j] ? el("span", {}, effectOf(table.effects[j])) : null),
      el("span", { class: "quiet small text", dir: "auto" }, visible(table.first[j])))))];
}
// An effect on held-out examples in a few words.
const effectOf = ({ ratio, interval, limit }) => `held-out KL ratio ${times(ratio)}${interval ? ` (${between(interval)})` : ""}${limit === null ? "" : isNone({ ratio, limit }) ? ": no effect above chance" : `, chance ≤ ${times(limit)}`}`;
const most = (counts) => counts.map(([name, n]) => `${name} ${n}`).join(", ");

function mapSection(d, { table, themes }) {
  return el("div", { class: "columns" },
    el("section", { class: "plot" }, el("h2", {}, "Map"), map(table, themes),
      el("p", { class: "quiet small" }, "Near to each other: components with similar coefficients. Size: energy. ",
        [["prediction", "prediction-tuned"], ["both", "prediction and label"], ["lnp", "LnP-tuned"], ["none", "not tuned"]].map(([kind, title]) =>
          el("span", { class: "key" }, svg("svg", { class: "dot", viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("circle", { class: `point ${kind}`, cx: 5, cy: 5, r: 4 })), title)))),
    el("aside", {},
      el("section", {}, el("h2", {}, "Run"),
        el("dl", {}, run.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, visible(String(number(value))))]))),
      el("section", {}, el("h2", {}, worded("loss", "Loss per example")), d.losses.length > 1 ? curve(d.losses) : el("p", { class: "quiet" }, "No history."),
        d.verdict ? el("p", { class: "quiet small" }, d.verdict) : null)));
}

function tableSection(d, { table, themes }) {
  return [el("h2", {}, "Components"),
    themes.problem ? el("p", { class: "problem", role: "alert" }, `Themes cannot be shown. ${visible(themes.problem)}`) : null,
    componentTable(d, table, themes)];
}

function methodSection() {
  return run.decompositions.length > 1 ? [el("h2", {}, "All decompositions"), methodTable()] : null;
}

function methodTable() {
  const share = (rate) => el("td", { class: "number", title: rate ? `by chance ${tiny(rate.expected)}` : "" }, percent(rate ? rate.share : null));
  const heads = [["name", ""], ["method", ""], ["components", "number"], ["left out", "number"], ["prediction-tuned", "number"], ["label-tuned", "number"], ["LnP-tuned", "number"], ["explained", "number"]];
  return el("div", { class: "scroll" }, el("table", { id: "methods" },
    el("thead", {}, el("tr", {}, heads.map(([title, kind]) => el("th", { scope: "col", class: kind }, WORDS[title] ? worded(title) : title)))),
    el("tbody", {}, run.decompositions.map((d) => el("tr", {},
      el("td", {}, el("a", { href: `#/d/${encodeURIComponent(d.name)}` }, d.name)), el("td", {}, d.method),
      el("td", { class: "number" }, String(d.components)), el("td", { class: "number" }, String(d.left_out)),
      Object.keys(KINDS).map((kind) => share(d.tunings[kind])), el("td", { class: "number" }, percent(d.explained)))))));
}

const effectCell = (effect) => (!effect ? "–" : [times(effect.ratio), effect.interval ? el("span", { class: "quiet small" }, ` ${between(effect.interval, "–")}`) : null,
  isNone(effect) ? el("div", { class: "quiet small" }, "no effect above chance") : null]);

function componentTable(d, table, themes) {
  const key = d.name;
  const state = tables[key] || (tables[key] = { query: "", kind: "all", sort: table.recurrence ? "recurrence" : "energy", down: true, shown: 100 });
  const count = table.energy.length;
  const themed = SERVED || themes.size > 0, inside = table.inside;
  const theme = Array.from({ length: count }, (_, j) => themeText(themes.get(j)));
  const labelled = table.label_purity.some((value) => value !== null);
  const haystack = Array.from({ length: count }, (_, j) => `${j} ${theme[j]} ${themes.has(j) ? themes.get(j).note : ""} ${most(table.labels[j])} ${most(table.predictions[j])} ${table.first[j]} ${inside ? `${inside.names[j]} ${inside.terms[j]}` : ""} `.toLowerCase());
  const heads = [
    ["number", "component", "number"], ...(themed ? [["theme", "theme", ""]] : []), ...(inside ? [["words", "words of its examples", "", "words"]] : []), ["tuned", "tuned", ""], ...(table.recurrence ? [["recurrence", "recurrence", "number"]] : []), ["energy", "energy", "number"], ["density", "density", "number optional"],
    ...(labelled ? [["label_purity", "label purity", "number optional"]] : []), ["prediction_purity", "prediction purity", "number optional"],
    ...(table.kl_ratio ? [["kl_ratio", "KL ratio", "number", "held-out KL ratio"]] : []), ...(table.stability ? [["stability", "stability", "number optional"]] : []),
    ["first", "first example", "wide"],
  ];
  const value = {
    number: (j) => j,
    theme: (j) => theme[j].toLowerCase() || "\uffff", // those without come last
    tuned: (j) => (table.lnp[j] ? 4 : 0) + (table.label[j] ? 2 : 0) + (table.prediction[j] ? 1 : 0) - (table.prediction[j] === null ? 1 : 0),
    first: (j) => table.first[j].toLowerCase(),
    recurrence: (j) => table.recurrence[j] * 1000 + table.energy[j], // equally often found: by energy
    words: (j) => inside.names[j] || "\uffff",
  };
  const of = (name) => value[name] || ((j) => (table[name][j] === null ? -1 : table[name][j]));
  const fits = {
    all: () => true, prediction: (j) => table.prediction[j], label: (j) => table.label[j], lnp: (j) => table.lnp[j],
    none: (j) => table.prediction[j] === false && !table.label[j], few: (j) => table.prediction[j] === null,
    themed: (j) => theme[j], unthemed: (j) => !theme[j],
  };
  const body = el("tbody");
  let listed = []; // the components that fit, in order
  const said = el("span", { class: "quiet", role: "status" });
  const more = el("button", { type: "button", onclick: () => { state.shown += 400; show(); } }, "Show more");
  const head = el("tr", {}, heads.map(([name, title, kind, shown = title]) => el("th", { class: kind, scope: "col", "data-name": name },
    el("button", { type: "button", onclick: () => {
      state.down = state.sort === name ? !state.down : !["number", "theme", "words", "first"].includes(name);
      state.sort = name;
      show();
    } }, shown), WORDS[title] ? [" ", what(title)] : null)));

  function show() {
    // as is_found in inside.py: a term that ends in a digit is meant as a whole
    const words = state.query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => (/:.*\d$/.test(word) ? `${word} ` : word));
    const rows = [];
    for (let j = 0; j < count; j++) if (fits[state.kind](j) && words.every((word) => haystack[j].includes(word))) rows.push(j);
    const by = of(state.sort);
    const sign = state.down ? -1 : 1;
    rows.sort((a, b) => { const x = by(a), y = by(b); return x < y ? -sign : x > y ? sign : a - b; });
    listed = rows;
    const largest = Math.max(...table.energy, 1e-12);
    body.replaceChildren(...rows.slice(0, state.shown).map((j) => el("tr", {},
      el("td", { class: "number" }, el("a", { href: componentLink(j) }, String(j))),
      themed ? el("td", { class: "theme-cell" }, themeChip(themes.get(j))) : null,
      inside ? el("td", { class: "small words", dir: "auto" }, visible(inside.names[j]), inside.argues_for[j] ? el("div", { class: "quiet" }, `for ${visible(inside.argues_for[j])}`) : null) : null,
      el("td", {}, badges(flagsOf(table, j))),
      table.recurrence ? el("td", { class: "number" }, percent(table.recurrence[j], 0)) : null,
      el("td", { class: "number" }, bar(table.energy[j] / largest), ` ${percent(table.energy[j], 2)}`),
      el("td", { class: "number optional" }, percent(table.density[j])),
      labelled ? el("td", { class: "number optional", title: most(table.labels[j]) }, percent(table.label_purity[j], 0)) : null,
      el("td", { class: "number optional", title: most(table.predictions[j]) }, percent(table.prediction_purity[j], 0)),
      table.effects ? el("td", { class: "number" }, effectCell(table.effects[j])) : null,
      table.stability ? el("td", { class: "number optional", title: "mean similarity with its match in other seeds" }, similar(table.stability[j])) : null,
      el("td", { class: "wide" }, el("a", { class: "text small", dir: "auto", href: componentLink(j) }, visible(table.first[j]))))));
    for (const cell of head.children) {
      if (cell.dataset.name === state.sort) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    said.textContent = `${rows.length} of ${count}`;
    more.hidden = rows.length <= state.shown;
  }

  const filter = el("input", { type: "search", id: "filter", title: inside ? "Words, or argues:ANSWER, head:LAYER.HEAD, like:COMPONENT" : null, placeholder: themed ? "Filter by theme, note, text, label" : "Filter components", "aria-label": "Filter components",
    value: state.query, oninput: (event) => { state.query = event.target.value; show(); } });
  const titles = { all: "all", prediction: "prediction-tuned", label: "label-tuned", lnp: "LnP-tuned", none: "not tuned", few: "too few examples",
    ...(themed ? { themed: "with a theme", unthemed: "without a theme" } : {}) };
  const kind = el("select", { id: "kind", "aria-label": "Tuning", onchange: (event) => { state.kind = event.target.value; show(); } },
    Object.entries(titles).map(([name, title]) => el("option", { value: name, selected: state.kind === name }, title)));
  show();
  const shown = el("table", { id: "components" }, el("thead", {}, head), body);
  const columns = ["prediction", "label", "lnp", "recurrence", "energy", "density", "active", "label_purity", "prediction_purity", "kl_ratio", "stability", "first"].filter((name) => table[name]);
  shown.csv = () => [["component", "theme", ...columns, "labels", "predictions", ...(inside ? ["words", "argues_for"] : [])],
    ...listed.map((j) => [j, theme[j], ...columns.map((name) => table[name][j]), most(table.labels[j]), most(table.predictions[j]), ...(inside ? [inside.names[j], inside.argues_for[j]] : [])])];
  return [el("div", { class: "tools" }, filter, kind, said), el("div", { class: "scroll" }, shown),
    el("p", {}, more)];
}
