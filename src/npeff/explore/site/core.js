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

// The table of components of decomposition number d: what the analysis says of them as columns, too.
const COLUMNS = { prediction: "prediction_tuned", label: "label_tuned", lnp: "lnp_tuned", energy: "energy", density: "density", recurrence: "recurrence", prediction_purity: "prediction_purity", label_purity: "label_purity" };
async function tableOf(d) {
  const table = await load(`${d}/components`);
  if (!table.energy) for (const [column, name] of Object.entries(COLUMNS)) table[column] = table.components[name];
  if (table.recurrence && table.recurrence.every((share) => share === null)) table.recurrence = null; // not measured
  table.kl_ratio = table.effects && table.effects.map((effect) => (effect ? effect.ratio : null)); // on held-out examples
  return table;
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
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
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
function badges(flags) {
  if (flags.prediction === null) return el("span", { class: "badge none", title: "too few active examples" }, "too few");
  const shown = Object.keys(KINDS).filter((kind) => flags[kind] && !(kind === "label" && flags.lnp));
  if (!shown.length) return el("span", { class: "badge none" }, "not tuned");
  return shown.map((kind) => el("span", { class: `badge ${kind}`, title: WORDS[`${KINDS[kind]}-tuned`] }, KINDS[kind]));
}

const flagsOf = (table, j) => ({ prediction: table.prediction[j], label: table.label[j], lnp: table.lnp[j] });

// --- where we are -------------------------------------------------------------------------------------------------

let run = null;
let current = 0; // decomposition

const home = () => `#/d/${encodeURIComponent(run.decompositions[current].name)}`;
const componentLink = (j) => `${home()}/c/${j}`;
const exampleLink = (i) => `${home()}/e/${i}`;

// view → function (decomposition, rest of the address, whether the reader is still here) → content
const routes = new Map();
const route = (view, show) => routes.set(view, show);

// Addresses are #/d/DECOMPOSITION/VIEW/ARGUMENT; #/VIEW/ARGUMENT means the default one.
function parse(hash) {
  const parts = hash.replace(/^#\/?/, "").split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  if (parts[0] !== "d") parts.unshift("d", run.decompositions[run.default].name);
  const found = run.decompositions.findIndex((d) => d.name === parts[1]);
  return { d: Math.max(found, 0), show: found < 0 ? null : routes.get(parts[2] || ""), argument: parts.slice(3).join("/") };
}

let drawn = 0;
async function draw() {
  const ticket = ++drawn;
  const place = parse(location.hash);
  current = place.d;
  $("pick").value = String(current);
  $("try-link").href = `${home()}/try`;
  let content;
  try {
    if (!place.show) throw new Error("There is no such page.");
    content = await place.show(run.decompositions[current], place.argument, () => ticket === drawn);
  } catch (error) {
    content = [el("h1", {}, "Not found"), el("p", {}, error.message), el("p", {}, el("a", { href: "#/" }, "To the overview"))];
  }
  if (ticket !== drawn) return; // the reader has gone on meanwhile
  $("meaning").replaceChildren();
  $("main").replaceChildren(...[content].flat(Infinity).filter(Boolean));
  document.title = `${$("main").querySelector("h1").textContent} · npeff`;
  window.scrollTo(0, 0);
  if (document.activeElement !== $("query")) $("main").focus({ preventScroll: true });
}

// --- start --------------------------------------------------------------------------------------------------------

function remember(name, value) { try { localStorage.setItem(name, value); } catch { /* not from every disk */ } }
function remembered(name) { try { return localStorage.getItem(name); } catch { return null; } }

function startScheme() {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => { document.documentElement.dataset.scheme = remembered("npeff-scheme") || (dark.matches ? "dark" : "light"); };
  dark.addEventListener("change", apply);
  $("scheme").addEventListener("click", () => {
    const scheme = document.documentElement.dataset.scheme === "dark" ? "light" : "dark";
    remember("npeff-scheme", scheme);
    document.documentElement.dataset.scheme = scheme;
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
  else if (event.key === "e" && $("edit")) { event.preventDefault(); $("edit").click(); }
  else if (event.key === "t" && SERVED) location.hash = `${home()}/try`;
}

async function start() {
  startScheme();
  document.documentElement.dataset.served = String(SERVED);
  $("try-link").hidden = !SERVED;
  run = await load("run");
  run.decompositions = run.decompositions.map(({ analysis, ...rest }) => ({ ...analysis, ...rest }));
  const facts = Object.fromEntries(run.facts);
  $("run-name").textContent = visible(`${facts.task} · ${String(facts.model).split("/").pop()}`);
  $("pick").append(...run.decompositions.map((d, n) => el("option", { value: n }, d.name)));
  $("pick-box").hidden = $("compare-link").hidden = run.decompositions.length < 2;
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

// the scripts of the pages come after this one and are there when the document is
document.addEventListener("DOMContentLoaded", () => start().catch((error) => { $("main").replaceChildren(el("h1", {}, "Cannot show this run"), el("p", {}, error.message)); }));
