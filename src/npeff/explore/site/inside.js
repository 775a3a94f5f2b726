// What is inside a component: its words, answers, heads and neurons, as `npeff explain` found them.
"use strict";

componentSections.main.splice(1, 0, namesSection);
componentSections.main.push(casesSection);
componentSections.side.unshift(answersSection, headsSection);
componentSections.side.push(neuronsSection, traceSection, nearSection);

// A text with its words shaded by what they carry; places count characters, not UTF-16 units.
function shaded(text, { places, effects, pairs = [] }) {
  const characters = Array.from(text), parts = [];
  let at = 0;
  places.forEach(([start, stop], k) => {
    if (stop > characters.length || start < at) return;
    const pair = pairs.find(({ first }) => first === k || first === k - 1);
    const lost = `without it ${effects[k] >= 0 ? "−" : "+"}${percent(Math.abs(effects[k]), 0)}`;
    const word = el("mark", { class: effects[k] < 0 ? "word against" : "word", title: pair ? `${lost}; with its neighbour −${percent(pair.effect, 0)}` : lost }, visible(characters.slice(start, stop).join("")));
    word.style.setProperty("--carries", `${(100 * Math.min(1, Math.abs(effects[k]))).toFixed(0)}%`);
    if (pair) word.classList.add("pair");
    parts.push(visible(characters.slice(at, start).join("")), word);
    at = stop;
  });
  return [...parts, visible(characters.slice(at).join(""))];
}

function namesSection({ inside }) {
  if (!inside || !inside.name) return null;
  const { words, odds, detection, skews } = inside.name;
  const said = ({ what: kind, value, users, others }) => (kind === "length" ? `${value}: ${users.toFixed(1)} words, others ${others.toFixed(1)}` : `${kind} ${visible(value)} ${percent(users, 0)}, others ${percent(others, 0)}`);
  const told = !words.length ? null : detection === null ? "Too few held-out examples to check" : ["Held-out examples told by these words: ", el("b", { class: "inline" }, percent(detection, 0)), " (50% by chance)"];
  return el("section", { id: "name", class: "card" }, el("h2", {}, worded("words of its examples", "Words of its examples")),
    words.length ? asTable(el("p", {}, words.map((word, k) => [el("span", { class: "chip", dir: "auto", title: `odds × ${times(Math.exp(odds[k]))}` }, visible(word)), " "])), () => [["word", "log-odds", "standard errors"], ...words.map((word, k) => [word, odds[k], inside.name.clarity[k]])])
      : el("p", { class: "quiet" }, "No word is clearly commoner in its examples than in others."),
    el("p", { class: "quiet small" }, [told, ...skews.filter(({ what: kind, users, others }) => (kind === "length" ? Math.abs(users / others - 1) : users - others) > 0.1).map(said)].filter(Boolean).map((part, n) => [n ? " · " : "", part])), judgedTable(inside.judged));
}

// What a language model tells by the theme, by the words and, for comparison, by what another component is called.
function judgedTable(judged) {
  if (!judged) return null;
  const share = (value) => el("td", { class: "number" }, value === null ? "–" : percent(value, 0));
  return el("table", { class: "tight", id: "judged" }, el("caption", { class: "quiet small" }, `Held-out examples told by ${visible(judged.model)}, with the description alone`),
    el("thead", {}, el("tr", {}, ["by", "detection (50%)", "intruder (20%)"].map((title, n) => el("th", { scope: "col", class: n ? "number" : "", title: n ? "in brackets: by chance" : null }, title)))),
    el("tbody", {}, judged.told.map(({ by, description, detection, intruder }) => el("tr", {}, el("th", { scope: "row", dir: "auto", title: visible(description) }, by === "other" ? "another's" : by), share(detection), share(intruder)))));
}

function answersSection({ inside }) {
  const found = inside && inside.answers;
  if (!found) return null;
  const largest = Math.max(...found.signature.map(Math.abs), 1e-12);
  const change = (value) => `${value >= 0 ? "+" : "−"}${times(Math.abs(value) / 100)}`;
  const head = (titles) => el("thead", {}, el("tr", {}, titles.map((title, n) => el("th", { scope: "col", class: n ? "number" : "", dir: "auto" }, title))));
  const kept = (table, rows) => { table.csv = () => rows; return table; };
  return el("section", { id: "answers" }, el("h2", {}, worded("argues for", "What it does to the answers")),
    el("p", {}, "+ raises ", el("span", { class: "chip", dir: "auto" }, visible(found.argues_for)), ` · its examples agree ${percent(found.coherence, 0)} `, what("agreement of examples")),
    kept(el("table", { class: "tight" }, el("tbody", {}, found.names.map((name, a) => el("tr", {}, el("th", { scope: "row", dir: "auto" }, visible(name)),
      el("td", { class: "number" }, bar(Math.abs(found.signature[a]) / largest), ` ${change(found.signature[a])}`))))), [["answer", "change of log-probability for a step of length 1"], ...found.names.map((name, a) => [name, found.signature[a]])]),
    el("p", { class: "quiet small" }, "Mean change of log-probability over top examples, for a step of length 0.01 along the component."),
    el("details", { id: "each" }, el("summary", { class: "small" }, `Each of the ${found.examples.length} examples`), el("div", { class: "scroll" }, kept(el("table", { class: "tight" }, head(["example", ...found.names.map(visible)]),
      el("tbody", {}, found.examples.map((i, k) => el("tr", {}, el("th", { scope: "row" }, el("a", { href: exampleLink(i) }, String(i))), found.changes[k].map((value) => el("td", { class: "number" }, change(value))))))),
      [["example", ...found.names], ...found.examples.map((i, k) => [i, ...found.changes[k]])]))));
}

const headName = ({ layer, kind, number: n }) => `${layer}.${kind === "kv" ? "kv" : ""}${n}`;

function headsSection({ inside }) {
  const found = inside && inside.parts;
  if (!found) return null;
  const said = el("p", { class: "small", role: "status" });
  const kinds = found.heads[0].map((_, n) => String(n));
  const share = ({ share: own, null: other }) => [el("td", { class: "number" }, tiny(own)), el("td", { class: "number" }, other ? `${times(own / other)} ×` : "–")];
  const list = el("table", { class: "tight" }, el("thead", {}, el("tr", {}, ["part", "share", "÷ random groups"].map((title, n) => el("th", { scope: "col", class: n ? "number" : "" }, title)))),
    el("tbody", {}, found.leading_heads.slice(0, 6).map((part) => el("tr", {}, el("td", {}, `${part.kind} ${part.layer}.${part.number}`), share(part)))));
  list.csv = partRows(found.leading_heads);
  return el("section", { id: "heads" }, el("h2", {}, worded("heads and neurons", "Attention heads")),
    heatMap({ layers: found.heads.map((_, n) => n), kinds, shares: found.heads }, (text) => { said.textContent = text.replace(" · ", " · head "); }), said,
    list);
}

// All leading parts, also those that are not shown.
const partRows = (parts) => () => [["kind", "layer", "number", "share", "random groups"], ...parts.map((part) => [part.kind, part.layer, part.number, part.share, part.null])];

function neuronsSection({ inside }) {
  const found = inside && inside.parts;
  if (!found) return null;
  return el("section", { id: "neurons" }, el("h2", {}, "Neurons and what carries the effect"),
    asTable(el("p", { class: "small" }, `Neurons have ${percent(found.neurons, 0)} of its squared length; most of it `, found.leading_neurons.slice(0, 6).map((part, n) => [n ? ", " : "", `${headName(part)} (${tiny(part.share)})`]), "."), partRows(found.leading_neurons)),
    found.curve.length ? el("table", { class: "tight", id: "sufficiency" }, el("thead", {}, el("tr", {}, ["leading parts", "energy", "keep", "left without"].map((title) => el("th", { scope: "col", class: "number" }, title)))),
      el("tbody", {}, found.curve.map((point) => el("tr", {}, [point.parts, point.energy, point.kept, point.left].map((value, n) => el("td", { class: "number" }, percent(value, 0), n === 2 && point.random !== null ? el("div", { class: "quiet" }, `random ${percent(point.random, 0)}`) : null)))))) : null,
    el("p", { class: "quiet small" }, worded("keep", "Effect on held-out examples"), " of these parts alone, and of all others, ÷ that of the whole direction."));
}

function traceSection({ inside }) {
  const found = inside && inside.trace;
  if (!found) return null;
  const said = el("p", { class: "small", role: "status" }), drawn = el("div");
  const name = (token) => visible(token).trim() || "⏎";
  const views = [["one example", found.tokens, found.sizes], [`mean of ${found.examples.length} examples`, found.places, found.mean]].slice(0, found.mean.length ? 2 : 1).reverse();
  const show = (tokens, sizes) => {
    const largest = Math.max(...sizes.flat(), 1e-12);
    drawn.replaceChildren(heatMap({ layers: sizes.map((_, n) => n), kinds: tokens.map(name), shares: sizes.map((row) => row.map((value) => value / largest)) }, (text) => { said.textContent = text; }));
  };
  const tabs = views.map(([title, ...shown], n) => el("button", { type: "button", "aria-pressed": String(n === 0), onclick: () => {
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === n)));
    show(...shown);
  } }, title));
  show(...views[0].slice(1));
  return el("section", { id: "trace" }, el("h2", {}, worded("trace", "How a change travels")),
    views.length > 1 ? el("div", { class: "tabs small", role: "group", "aria-label": "Trace of" }, tabs) : null, drawn, said,
    el("p", { class: "small" }, "In ", el("a", { href: exampleLink(found.example) }, `example ${found.example}`), ", the last token looks at:"),
    found.attention.map(({ head, weights }) => el("p", { class: "small" }, `head ${headName(head)}: `, weights.map((weight, t) => [weight, t]).sort((a, b) => b[0] - a[0]).slice(0, 3)
      .map(([weight, t], n) => [n ? ", " : "", el("span", { class: "chip", dir: "auto" }, name(found.tokens[t])), ` ${percent(weight, 0)}`]))));
}

function nearSection({ inside }, { table, themes }) {
  if (!inside || !inside.near.length) return null;
  return el("section", { id: "near" }, el("h2", {}, worded("similarity of vectors", "Nearest directions")), el("ul", { class: "list" }, inside.near.map((near) => el("li", {},
    el("a", { href: componentLink(near.component) }, `Component ${near.component}`), ` ${near.direction.toFixed(2)}`, near.parts === null ? "" : ` · heads ${near.parts.toFixed(2)}`, " ", themeChip(themes.get(near.component)),
    el("span", { class: "quiet small one-line", dir: "auto" }, visible(table.inside.names[near.component] || table.first[near.component]))))));
}

function casesSection({ inside }) {
  if (!inside || !inside.cases.length) return null;
  const largest = Math.max(...inside.cases.map((one) => one.coefficient), 1e-12);
  const line = (one) => (one.variant === "as it is"
    ? el("td", { class: "wide text", dir: "auto" }, visible(one.text), el("div", { class: "quiet small" }, el("a", { href: exampleLink(one.example) }, `example ${one.example}`), one.held_out ? " · held out" : null))
    : el("td", { class: "wide variant", dir: "auto", title: visible(one.text) }, visible(one.variant)));
  const table = el("table", { class: "tight" },
    el("thead", {}, el("tr", {}, ["example and variants", "coefficient", "answer"].map((title, n) => el("th", { scope: "col", class: n === 1 ? "number" : "" }, title)))),
    el("tbody", {}, inside.cases.map((one) => el("tr", { class: one.variant === "as it is" ? "best" : "" }, line(one),
      el("td", { class: "number" }, bar(one.coefficient / largest), ` ${decimals(one.coefficient)}`),
      el("td", {}, el("span", { class: "chip", dir: "auto" }, visible(one.answer)), ` ${percent(one.probability, 0)}`)))));
  table.csv = () => [["example", "held out", "variant", "text", "coefficient", "answer", "probability"], ...inside.cases.map((one) => [one.example, one.held_out, one.variant, one.text, one.coefficient, one.answer, one.probability])];
  return el("section", { id: "cases" }, el("h2", {}, worded("case study", "Case study")), el("div", { class: "scroll" }, table));
}

// --- words of texts that a reader tries --------------------------------------------------------------------------

function triedWords(d, result) {
  if (!result.components.length) return [];
  const listed = result.components.slice(0, 8), shown = el("div"), said = el("p", { class: "quiet", role: "status" });
  let weighed = null;
  const pick = el("select", { "aria-label": "Component", onchange: () => show() }, listed.map((j) => el("option", { value: j }, `component ${j}`)));
  const show = () => {
    if (weighed) shown.replaceChildren(...weighed.map(({ text, places, effects }, n) => el("p", { class: "text card", dir: "auto" }, el("b", { class: "letter" }, letter(n)), " ", shaded(text, { places, effects: effects[listed.indexOf(Number(pick.value))] }))));
  };
  const go = el("button", { type: "button", onclick: async () => {
    go.disabled = true;
    said.textContent = "Taking out one word after another…";
    try {
      const fields = Object.keys(result.asked[0].fields).length ? { fields: result.asked.map((one) => one.fields) } : {};
      weighed = (await tell("words", { decomposition: d.name, texts: result.asked.map(({ text }) => text), components: listed, ...fields })).value;
      said.textContent = "The darker, the more of the component's coefficient is lost without the word.";
      show();
    } catch (error) { said.textContent = error.message; } finally { go.disabled = false; }
  } }, "Show the carrying words");
  return [el("h2", {}, worded("carrying words", "Which words carry a component")), el("div", { class: "tools" }, pick, go), said, shown];
}
