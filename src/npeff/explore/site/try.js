// Texts of the reader's own, side by side: what the model answers and which components they use.
"use strict";

route("try", tryView);

const MOST_VARIANTS = 8;
const POLL = 400; // milliseconds
const NOTABLE = 0.1; // of the largest coefficient: differences from the first text that are marked
const trial = { variants: [], result: null }; // stays while the reader looks at other pages
const letter = (n) => String.fromCharCode(65 + n);

async function tryView(d, argument, wanted) {
  if (!SERVED) return [el("h1", {}, "Try your own text"), el("p", {}, "This needs the model: run npeff explore, which serves this page and loads it.")];
  const [table, state, themes] = await Promise.all([tableOf(current), ask("state", { decomposition: d.name }), themesOf(d)]);
  if (argument) {
    await startFrom(Number(argument), state.fields);
    history.replaceState(null, "", `${home()}/try`); // going back here later must not undo what was typed
  }
  if (!trial.variants.length) trial.variants.push(emptyVariant(state.fields));
  const boxes = el("div", { class: "variants" });
  const found = el("div", { id: "tried" });
  const said = el("span", { role: "status", class: "quiet" });
  const add = el("button", { type: "button", onclick: () => {
    const last = trial.variants[trial.variants.length - 1];
    trial.variants.push({ text: last.text, fields: { ...last.fields } });
    drawBoxes();
    boxes.lastChild.querySelector("textarea").focus();
  } }, "Add a variant");
  const go = el("button", { type: "submit", class: "primary" }, "Compare");

  function drawBoxes() {
    add.disabled = trial.variants.length >= MOST_VARIANTS;
    boxes.replaceChildren(...trial.variants.map((variant, n) => variantBox(variant, n, () => { trial.variants.splice(n, 1); drawBoxes(); boxes.querySelector("textarea").focus(); })));
  }

  async function compare() {
    const asked = trial.variants.map((variant) => ({ text: variant.text, fields: { ...variant.fields } }));
    if (asked.some(({ text }) => !text)) { said.textContent = "Every variant needs a text."; return; }
    go.disabled = true;
    try {
      trial.result = { d: d.name, asked, ...(await tryTexts(d, asked, (text) => { said.textContent = text; })) };
      said.textContent = "";
      if (wanted()) found.replaceChildren(...tried(trial.result, table, themes));
    } catch (error) {
      said.textContent = error.message;
    } finally {
      go.disabled = false;
    }
  }

  drawBoxes();
  if (trial.result && trial.result.d === d.name) found.replaceChildren(...tried(trial.result, table, themes));
  const form = el("form", {
    onsubmit: (event) => { event.preventDefault(); compare(); },
    onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); } },
  }, boxes, el("div", { class: "tools" }, go, add, said));
  return [
    el("div", { class: "title" }, el("h1", {}, "Try your own text"),
      el("nav", { "aria-label": "Up" }, el("a", { href: home(), rel: "up" }, "all components"))),
    el("p", { class: "quiet" }, "Write a text, add a variant that differs in a word or two, and see what the model answers and which components change. Ctrl+Enter compares."),
    el("details", {}, el("summary", { class: "small" }, "What the model is asked"), el("p", { class: "text small", dir: "auto" }, visible(String(Object.fromEntries(run.facts).prompt)))),
    form, found,
  ];
}

const emptyVariant = (fields) => ({ text: "", fields: Object.fromEntries(fields.map((name) => [name, ""])) });

// Two copies of an example: one to keep, one to edit.
async function startFrom(i, fields) {
  if (!Number.isInteger(i) || i < 0 || i >= run.examples) throw new Error(`There is no example ${i}.`);
  const texts = await load(`examples/${Math.floor(i / run.block)}`), at = i % run.block;
  const copy = () => ({ text: texts.text[at], fields: Object.fromEntries(fields.map((name) => [name, texts.fields[name][at]])) });
  trial.variants = [copy(), copy()];
  trial.result = null;
}

function variantBox(variant, n, remove) {
  const area = (value, name, change) => {
    const node = el("textarea", { rows: 4, dir: "auto", maxlength: 20000, "aria-label": `${name} ${letter(n)}`, oninput: (event) => change(event.target.value) });
    node.value = value;
    return node;
  };
  return el("div", { class: "card variant" },
    el("div", { class: "variant-head" }, el("b", { class: "letter" }, letter(n)),
      trial.variants.length > 1 ? el("button", { type: "button", "aria-label": `Remove ${letter(n)}`, title: "Remove", onclick: remove }, "×") : null),
    area(variant.text, "Text", (value) => { variant.text = value; }),
    Object.keys(variant.fields).map((name) => el("label", { class: "quiet small", dir: "auto" }, visible(name), area(variant.fields[name], name, (value) => { variant.fields[name] = value; }))));
}

// Ask until the model is there.
async function tryTexts(d, asked, say) {
  const body = { decomposition: d.name, texts: asked.map(({ text }) => text), ...(Object.keys(asked[0].fields).length ? { fields: asked.map(({ fields }) => fields) } : {}) };
  for (;;) {
    say("Computing…");
    const { status, value } = await tell("try", body);
    if (status === 200) return value;
    say("Loading the model; this takes a moment the first time…");
    for (;;) {
      await new Promise((done) => setTimeout(done, POLL));
      const { model } = await ask("state", { decomposition: d.name });
      if (model.state === "failed") throw new Error(model.message);
      if (model.state === "ready") break;
    }
  }
}

// --- what was found -------------------------------------------------------------------------------------------------

// A table with a column for each text, none of them too narrow for a bar and its number.
function sides(id, first, heads, rows) {
  const table = el("table", { id, class: "sides" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, first), heads)), el("tbody", {}, rows));
  table.style.minWidth = `${9 + 10.5 * heads.length}rem`;
  return el("div", { class: "scroll" }, table);
}

function tried(result, table, themes) {
  const heads = result.asked.map(({ text }, n) => el("th", { scope: "col" }, el("b", { class: "letter" }, letter(n)), " ",
    el("span", { class: "variant-text", dir: "auto", title: visible(text) }, visible(text.length > 60 ? `${text.slice(0, 59)}…` : text))));
  return [
    result.set_aside.some(Boolean) ? el("p", { class: "problem" }, `For ${result.set_aside.map((aside, n) => (aside ? letter(n) : "")).filter(Boolean).join(", ")} a value was not finite; there is nothing to show.`) : null,
    el("h2", {}, "What the model answers"),
    sides("tried-answers", "answer", heads.map((head) => head.cloneNode(true)), result.answers.map((answer, a) => el("tr", {},
      el("th", { scope: "row", dir: "auto" }, el("span", { class: "chip" }, visible(answer))),
      result.probabilities.map((row) => answerCell(row, a))))),
    el("h2", {}, "Which components it uses"),
    el("p", { class: "quiet small" }, worded("coefficient"), " and ", worded("share"), result.asked.length > 1 ? "; ▲ and ▼ mark clear differences from A." : "."),
    componentSides(result, table, themes, heads),
    ...triedWords(run.decompositions[current], result),
  ].filter(Boolean);
}

function answerCell(row, a) {
  const known = row.filter((value) => value !== null);
  if (row[a] === null) return el("td", { class: "quiet" }, `below ${percent(Math.min(...known))}`);
  return el("td", { class: row[a] === Math.max(...known) ? "likeliest" : "" }, bar(row[a]), ` ${percent(row[a])}`);
}

function componentSides(result, table, themes, heads) {
  const largest = Math.max(...result.coefficients.flat().map(Math.abs), 1e-12);
  const cell = (n, k) => {
    const value = result.coefficients[n][k], change = value - result.coefficients[0][k];
    const notable = Math.abs(change) >= NOTABLE * largest;
    return el("td", { class: notable ? (change > 0 ? "more" : "less") : "" },
      value === 0 ? el("span", { class: "quiet" }, "0") : [bar(Math.abs(value) / largest), ` ${decimals(value)}`],
      notable ? el("span", { class: "change" }, ` ${change > 0 ? "▲" : "▼"} ${decimals(Math.abs(change))}`) : null,
      value !== 0 && result.shares ? el("div", { class: "quiet small" }, `share ${percent(result.shares[n][k])}`) : null);
  };
  const tuned = (j) => (table.prediction[j] || table.label[j] ? badges({ prediction: table.prediction[j], label: table.label[j], lnp: table.lnp[j] }) : null);
  return sides("tried-components", "component", heads, [
    result.components.map((j, k) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: componentLink(j) }, `Component ${j}`), " ", themeChip(themes.get(j)), tuned(j),
        el("span", { class: "quiet small one-line", dir: "auto" }, visible(table.first[j]))),
      result.asked.map((_, n) => cell(n, k)))),
    el("tr", {}, el("th", { scope: "row" }, worded("left over")), result.residual.map((left) => el("td", {}, bar(left), ` ${percent(left)}`))),
  ]);
}
