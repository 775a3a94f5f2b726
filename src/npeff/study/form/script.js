// The form of a study. Every text of the data set reaches the page as a text node, never as markup.
"use strict";

const kit = JSON.parse(document.getElementById("kit").textContent);
const THEMES = ["yes", "maybe", "no"];
const place = `npeff-study:${kit.kit}:${kit.form}`;
const state = { who: "", answers: {} }; // by group: theme, words
const cards = [];
let here = 0;

const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

// Control characters have no shape of their own: show the symbol for each (line breaks and tabs stay).
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421");
}
const texts = (group) => el("ul", {}, ...group.texts.map((text) => el("li", { class: "text" }, visible(text))));

// --- what is kept in the browser until it is downloaded -----------------------------------------------------------

function restore() {
  try {
    const old = JSON.parse(localStorage.getItem(place) || "{}");
    if (typeof old.who === "string") state.who = old.who;
    for (const group of kit.groups) {
      const answer = (old.answers || {})[group.number] || {};
      state.answers[group.number] = {
        theme: THEMES.includes(answer.theme) ? answer.theme : null,
        words: typeof answer.words === "string" ? answer.words : "",
      };
    }
  } catch { // storage may be forbidden, or hold something else: begin again
    for (const group of kit.groups) state.answers[group.number] = { theme: null, words: "" };
  }
}

function count() {
  const done = kit.groups.filter((group) => state.answers[group.number].theme).length;
  $("progress").textContent = `${done} of ${kit.groups.length} answered`;
}

function keep() {
  count();
  try {
    localStorage.setItem(place, JSON.stringify(state));
    $("saved").textContent = "(kept in this browser)";
  } catch {
    $("saved").textContent = "(this browser keeps nothing: download before you leave)";
  }
}

// --- the page -----------------------------------------------------------------------------------------------------

function card(group, index) {
  const answer = state.answers[group.number];
  const words = el("input", {
    class: "words", placeholder: "theme in a few words", maxlength: 500, autocomplete: "off",
    "aria-label": `Theme of group ${group.number}`, oninput: () => { answer.words = words.value; keep(); },
  });
  words.value = answer.words;
  const radios = THEMES.map((theme) => {
    const radio = el("input", { type: "radio", name: `group-${group.number}`, value: theme, onchange: () => choose(theme) });
    radio.checked = answer.theme === theme;
    return radio;
  });
  function choose(theme) {
    answer.theme = theme;
    radios[THEMES.indexOf(theme)].checked = true;
    words.disabled = theme === "no";
    keep();
  }
  words.disabled = answer.theme === "no";
  const section = el("section", { id: `group-${group.number}`, tabindex: "-1", onfocusin: () => mark(index) },
    el("h2", {}, `Group ${group.number}`), texts(group),
    el("fieldset", {}, el("legend", {}, `Do the texts of group ${group.number} have a theme?`),
      ...radios.map((radio, i) => el("label", { class: "choice" }, radio, THEMES[i])), words));
  cards.push({ section, choose, words });
  return section;
}

function sample(group, index) {
  const answer = el("p", {}, "Answer: ", el("b", {}, group.theme));
  if (group.words) answer.append(`: ${visible(group.words)}`);
  return el("section", { class: "sample" }, el("h2", {}, `Sample ${index + 1}`), texts(group), answer);
}

function mark(index) {
  cards[here].section.classList.remove("here");
  here = index;
  cards[here].section.classList.add("here");
}

function go(index) {
  mark(Math.max(0, Math.min(cards.length - 1, index)));
  cards[here].section.focus({ preventScroll: true });
  cards[here].section.scrollIntoView({ block: "nearest" });
}

function download() {
  const answers = {};
  for (const group of kit.groups) {
    const { theme, words } = state.answers[group.number];
    if (theme) answers[group.number] = { theme, words: theme === "no" ? "" : words.trim() };
  }
  const missing = kit.groups.length - Object.keys(answers).length;
  if (!state.who.trim()) { $("saved").textContent = "Please give your name first."; $("name").focus(); return; }
  const content = { format: kit.format, kit: kit.kit, who: state.who.trim(), source: "person", answers };
  const name = state.who.trim().toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "annotator";
  const part = kit.forms > 1 ? `-${kit.form}` : "";
  const url = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2) + "\n"], { type: "application/json" }));
  el("a", { href: url, download: `answers-${name}${part}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
  $("saved").textContent = missing ? `Downloaded; ${missing} not answered yet.` : "Downloaded. Thank you!";
}

function keys(event) {
  const typing = event.target instanceof HTMLInputElement && event.target.type !== "radio";
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing) {
    if (event.key === "Enter" && event.target.classList.contains("words")) { go(here + 1); event.preventDefault(); }
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const theme = THEMES.find((name) => name[0] === event.key.toLowerCase());
  if (theme) {
    cards[here].choose(theme);
    if (theme === "no") go(here + 1);
    else cards[here].words.focus();
  } else if (event.key === "j") go(here + 1);
  else if (event.key === "k") go(here - 1);
  else return;
  event.preventDefault();
}

function key(name) { return el("kbd", {}, name); }

function start() {
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  $("theme").addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
  restore();
  const name = el("input", { id: "name", maxlength: 100, autocomplete: "off", oninput: () => { state.who = name.value; keep(); } });
  name.value = state.who;
  $("main").append(
    ...kit.preamble.map((text) => el("p", { class: "text" }, visible(text))),
    ...kit.samples.map(sample),
    el("p", {}, el("label", {}, "Your name", name)),
    el("p", { class: "quiet" }, "Answers stay in this browser until you download them and send the file back. Keys: ",
      key("y"), " ", key("m"), " ", key("n"), " answer the marked group, ", key("Enter"), " after the theme goes on, ",
      key("j"), " ", key("k"), " next and previous, ", key("Esc"), " leaves a field."),
    ...kit.groups.map(card));
  mark(0);
  count(); // not keep(): a page that could not read what was kept must not write over it
  document.addEventListener("keydown", keys);
  $("download").addEventListener("click", download);
}

start();
