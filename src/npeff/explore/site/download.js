// Every figure and table can be kept: figures as SVG and PNG, tables (and the numbers of a figure) as CSV, pages as links.
"use strict";

// What a style sheet may say about a figure, written into a figure that has to do without.
const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "opacity", "visibility", "font-family", "font-size", "font-weight", "text-anchor"];
const SHARPNESS = 2; // pixels of a PNG for each unit of the figure, unless that is more than browsers draw
const LARGEST = 16000;

// --- what is kept -------------------------------------------------------------------------------------------------

// A copy that looks the same outside of this page, and its size.
function standalone(figure) {
  const copy = figure.cloneNode(true);
  const { width, height } = figure.viewBox.baseVal;
  const [from, to] = [figure, copy].map((node) => [node, ...node.querySelectorAll("*")]);
  from.forEach((node, n) => {
    const style = getComputedStyle(node);
    for (const name of DRAWN) if (style.getPropertyValue(name)) to[n].setAttribute(name, style.getPropertyValue(name));
    for (const name of ["class", "id", "tabindex", "href"]) to[n].removeAttribute(name);
  });
  for (const [name, value] of Object.entries({ xmlns: SVG, width, height })) copy.setAttribute(name, value);
  const page = getComputedStyle(document.body).backgroundColor;
  copy.prepend(svg("rect", { width, height, fill: page }));
  return { text: new XMLSerializer().serializeToString(copy), width, height };
}

async function picture(figure) {
  const { text, width, height } = standalone(figure);
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const scale = Math.min(SHARPNESS, LARGEST / Math.max(width, height));
  const canvas = el("canvas", { width: Math.round(width * scale), height: Math.round(height * scale) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) => { canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("too large for a PNG"))), "image/png"); });
}

// A list that can be kept like a table: `rows` gives them all, the first with titles.
function asTable(node, rows) {
  node.csv = rows;
  node.dataset.rows = "";
  return node;
}

const textOf = (cell) => cell.textContent.replace(/\s+/g, " ").trim();
const rowsOf = (table) => (table.csv ? table.csv() : Array.from(table.rows, (row) => Array.from(row.cells, textOf)));

function csv(rows) {
  const cell = (value) => { const text = String(value ?? ""); return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  return `${rows.map((row) => row.map(cell).join(",")).join("\r\n")}\r\n`;
}

// --- giving it out ------------------------------------------------------------------------------------------------

function give(blob, name) {
  const address = URL.createObjectURL(blob);
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

function headingOf(node) {
  const before = [...$("main").querySelectorAll("h2, h3")].filter((heading) => heading.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING);
  return before.length ? before[before.length - 1].textContent.trim() : "";
}

function fileName(node, ending) {
  const title = $("main").querySelector("h1");
  const words = [title.dataset.file || `${run.decompositions[current].name} ${title.textContent}`, headingOf(node)].join(" ");
  return `${words.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 90)}.${ending}`;
}

const MAKERS = {
  SVG: (node) => new Blob([standalone(node).text], { type: "image/svg+xml" }),
  PNG: picture,
  CSV: (node) => new Blob([csv(rowsOf(node))], { type: "text/csv;charset=utf-8" }),
};

function saveControl(node) {
  const kinds = node instanceof SVGElement ? ["SVG", "PNG", ...(node.csv ? ["CSV"] : [])] : ["CSV"];
  const what = node instanceof SVGElement ? "figure" : node instanceof HTMLTableElement ? "table" : "list";
  return el("div", { class: "save" }, kinds.map((kind) => el("button", { type: "button", title: `Save this ${what} as ${kind}`, "aria-label": `Save this ${what} as ${kind}: ${headingOf(node) || "figure"}`, onclick: async (event) => {
    const button = event.currentTarget;
    try {
      give(await MAKERS[kind](node), fileName(node, kind.toLowerCase()));
    } catch (error) {
      button.textContent = `${kind}: ${error.message}`;
    }
  } }, kind)));
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not allowed on every page from disk
    const box = el("textarea", { readonly: true }, text);
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
}

function copyButton() {
  const button = el("button", { type: "button", class: "copy small", onclick: async () => {
    await copyText(location.href);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy link"; }, 1500);
  } }, "Copy link");
  return button;
}

// Pages draw what they like; whatever is a figure or a table gets its buttons when it appears.
function addControls() {
  for (const node of $("main").querySelectorAll(":is(svg[role=img], table, [data-rows]):not([data-kept])")) {
    node.dataset.kept = "";
    (node.closest(".scroll") || node).after(saveControl(node));
  }
  for (const title of $("main").querySelectorAll(".title:not([data-kept])")) {
    title.dataset.kept = "";
    (title.querySelector("nav") || title.lastElementChild).before(copyButton());
  }
}

document.addEventListener("DOMContentLoaded", () => new MutationObserver(addControls).observe($("main"), { childList: true, subtree: true }));
