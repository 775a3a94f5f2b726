// The page of one example.
"use strict";

route("e", exampleView);

async function exampleView(d, argument) {
  const i = Number(argument);
  if (!Number.isInteger(i) || i < 0 || i >= run.examples) throw new Error(`There is no example ${argument}.`);
  const block = Math.floor(i / run.block), at = i % run.block;
  const [texts, parts, table, themes] = await Promise.all([load(`examples/${block}`), load(`${current}/examples/${block}`), tableOf(current), themesOf(d)]);
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
      el("div", { class: "facts" }, answers(texts.label[at], texts.prediction[at], texts.probability[at]),
        SERVED ? el("a", { href: `${home()}/try/${i}` }, "Try variants of this text") : null)),
    texts.aside[at] ? el("p", {}, `Set aside: ${texts.aside[at]}. No component describes it.`) : [
      el("h2", {}, "Which components explain it"),
      shares ? stack : null,
      el("p", { class: "quiet" }, shares ? ["Each part of the bar is the ", worded("share"), " of a component. "] : null, `${percent(1 - left)} explained, ${percent(left)} left over `, what("left over"), `; ${number(parts.used[at])} components are active`,
        parts.used[at] > components.length ? `, the largest ${components.length} are listed.` : "."),
      asTable(el("ul", { class: "list" }, components.map((j, n) => el("li", {},
        el("a", { href: componentLink(j) }, `Component ${j}`), " ", themeChip(themes.get(j)), badges(flagsOf(table, j)),
        el("div", { class: "facts" }, el("span", {}, `coefficient ${decimals(coefficients[n])}`),
          shares ? el("span", {}, bar(shares[n]), ` share ${percent(shares[n])}`) : null),
        el("span", { class: "quiet small text", dir: "auto" }, visible(table.first[j]))))),
      () => [["component", "coefficient", "share"], ...components.map((j, n) => [j, coefficients[n], shares ? shares[n] : ""])]),
    ],
  ];
}

// --- an example in a list, for every page -------------------------------------------------------------------------

function exampleItem(i, [text, label, prediction, probability], more, words) {
  return el("li", {},
    el("a", { class: words ? "text weighed" : "text", dir: "auto", href: exampleLink(i) }, words ? shaded(text, words) : visible(text)),
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
