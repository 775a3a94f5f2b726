// The page of one component: a list of sections, in the main column or beside it.
"use strict";

route("c", componentView);

// Functions (component's data, {d, j, table, themes, title, ordering}) → an element or null, or a promise of one; scripts
// of other pages add theirs. `ordering(show)` calls show(ordering) now and when the reader chooses another ordering.
const componentSections = { main: [themeSection, examplesSection], side: [crossSection, histogramSection, groupSection, correlatedSection] };

async function componentView(d, argument) {
  const j = Number(argument);
  if (!Number.isInteger(j) || j < 0 || j >= d.components) throw new Error(`There is no component ${argument} in ${d.name}.`);
  const [page, table, themes] = await Promise.all([load(`${current}/component/${j}`), tableOf(current), themesOf(d)]);
  const [{ quantiles }] = page.component.orderings;
  const shows = [];
  const title = el("span", { id: "component-theme" });
  const context = { d, j, table, themes, title, ordering: (show) => { shows.push(show); show(page.orderings[0]); } };
  const made = (sections) => Promise.all(sections.map((section) => section(page, context)));
  const tabs = page.orderings.map((ordering, n) => el("button", { type: "button", "aria-pressed": String(n === 0), onclick: () => {
    tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(i === n)));
    shows.forEach((show) => show(ordering));
  } }, ordering.order));
  return [
    el("div", { class: "title" }, el("h1", {}, `Component ${j}`), title,
      el("span", {}, badges(flagsOf(table, j))),
      el("nav", { "aria-label": "Components" },
        j > 0 ? el("a", { href: componentLink(j - 1), rel: "prev" }, `← ${j - 1}`) : null,
        el("a", { href: home(), rel: "up" }, "all components"),
        j + 1 < d.components ? el("a", { href: componentLink(j + 1), rel: "next" }, `${j + 1} →`) : null)),
    el("p", { class: "quiet" }, worded("energy"), ` ${percent(table.energy[j], 2)} · active in ${percent(table.density[j])} of the examples `, what("density"),
      table.recurrence ? [` · found again by ${percent(table.recurrence[j], 0)} of ${d.inputs.options.refits} other fits `, what("recurrence")] : null,
      quantiles.length ? ` · median coefficient ${decimals(quantiles[2])}, largest ${decimals(quantiles[6])}` : ""),
    el("div", { class: "columns" },
      el("div", {}, tabs.length > 1 ? el("div", { class: "tabs", role: "group", "aria-label": "Rank by" }, tabs) : null, await made(componentSections.main)),
      el("aside", {}, await made(componentSections.side))),
  ];
}

function examplesSection(page, context) {
  const lists = el("div");
  context.ordering((ordering) => lists.replaceChildren(...exampleLists(page, ordering)));
  return lists;
}

function crossSection(page, context) {
  const section = el("section");
  context.ordering(({ cross }) => section.replaceChildren(el("h2", {}, cross.labels ? "Label × prediction" : "Predictions"), crossTable(cross, context.d.top)));
  return section;
}

function histogramSection(page) {
  return el("section", {}, el("h2", {}, worded("coefficient", "Coefficients")), columns(page.histogram),
    el("p", { class: "quiet small" }, `${number(page.histogram.zero)} examples with 0 not drawn`));
}

// The smallest group that the component belongs to, and how large those are that contain it.
function groupSection(page, { j, table, themes }) {
  const group = table.groups.find((each) => each.members.includes(j)); // the closest ones come first
  if (!group) return null;
  const larger = [];
  for (let each = group; each.parent !== null; larger.push(each)) each = table.groups[each.parent];
  return el("section", { id: "group" }, el("h2", {}, worded("group", `Group ${group.number}`)),
    el("p", { class: "quiet small" }, `mean correlation ${group.correlation.toFixed(2)}`, larger.map((each) => ` · in group ${each.number} of ${each.members.length} (${each.correlation.toFixed(2)})`)),
    el("ul", { class: "list" }, group.members.filter((k) => k !== j).map((k) => el("li", {}, el("a", { href: componentLink(k) }, `Component ${k}`), " ", themeChip(themes.get(k)),
      badges(flagsOf(table, k)), el("span", { class: "quiet small one-line", dir: "auto" }, visible(table.first[k]))))));
}

function correlatedSection(page, { table, themes }) {
  const related = page.component.correlated.map((k, n) => [k, page.component.correlation[n]]).filter(([, r]) => Math.abs(r) >= 0.005);
  if (!related.length) return null;
  return el("section", {}, el("h2", {}, worded("correlation", "Most correlated")), el("ul", { class: "list" }, related.map(([k, r]) => el("li", {},
    el("a", { href: componentLink(k) }, `Component ${k}`), ` ${r.toFixed(2)} `, themeChip(themes.get(k)),
    badges(flagsOf(table, k)),
    el("span", { class: "quiet small one-line", dir: "auto" }, visible(table.first[k]))))));
}

const FEW = 5; // top examples that a narrow screen shows at first
const narrow = () => window.matchMedia("(max-width: 760px)").matches;

function exampleLists(page, ordering) {
  if (!ordering.active) return [el("p", { class: "quiet" }, "No example has this component.")];
  return ordering.lists.flatMap((list, n) => {
    // on a narrow screen what stands beside the examples comes below them, and should not be far away
    const few = n === 0 && narrow() ? FEW : list.examples.length;
    const title = n === 0 ? `Top ${list.examples.length} of ${number(ordering.active)} active examples`
      : `Lower down: from place ${number(list.place + 1)} (${percent(list.place / ordering.active, 0)} of the way)`;
    const items = el("ol", { class: "list" }, list.examples.map((i, k) => exampleItem(i, page.shown[i],
      [`coefficient ${decimals(list.coefficients[k])}`, list.shares ? [bar(list.shares[k]), ` share ${percent(list.shares[k])}`] : null, page.inside && page.inside.words[i] && page.inside.words[i].held_out ? "held out" : null], page.inside && page.inside.words[i])));
    const rest = [...items.children].slice(few);
    rest.forEach((item) => { item.hidden = true; });
    const more = el("button", { type: "button", onclick: () => { rest.forEach((item) => { item.hidden = false; }); more.remove(); } }, `Show all ${list.examples.length}`);
    const table = asTable(items, () => [["place", "example", "text", "label", "prediction", "probability", "coefficient", "share"],
      ...list.examples.map((i, k) => [list.place + k + 1, i, ...page.shown[i], list.coefficients[k], list.shares ? list.shares[k] : ""])]);
    if (n && narrow()) return el("details", {}, el("summary", {}, title), table);
    return [el("h2", {}, title), n === 0 && list.shares ? el("p", { class: "quiet small" }, worded("coefficient"), " · ", worded("share"), page.inside && Object.keys(page.inside.words).length ? [" · ", worded("carrying words", "shaded: carrying words")] : null) : null, table, rest.length ? el("p", {}, more) : null].filter(Boolean);
  });
}

function crossTable(cross, top) {
  const rows = cross.labels || [""];
  return el("div", {}, el("table", { class: "cross" },
    el("thead", {}, el("tr", {}, cross.labels ? el("td", { class: "quiet small" }, "label ↓ predicted →") : el("td"), cross.predictions.map((name) => el("th", { scope: "col", class: "number", dir: "auto" }, visible(name))))),
    el("tbody", {}, rows.map((name, r) => el("tr", {}, el("th", { scope: "row", dir: "auto" }, visible(name)),
      cross.predictions.map((_, c) => el("td", { class: "number" }, String(cross.top[r][c]), el("span", { class: "quiet small" }, ` / ${number(cross.active[r][c])}`))))))),
    el("p", { class: "quiet small" }, `in the top ${top} / among all active examples`));
}
