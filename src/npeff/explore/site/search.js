// Search in the texts of the examples.
"use strict";

route("search", searchView);

const MOST = 200;
const USED = 3; // components of a hit that are named

// The components that an example uses most, as links.
function usedComponents(parts, at) {
  if (!parts.components[at].length) return "no component is active";
  return ["components ", parts.components[at].slice(0, USED).map((j, n) => [n ? ", " : "", el("a", { href: componentLink(j) }, String(j)),
    parts.shares[at] ? ` (${percent(parts.shares[at][n], 0)})` : ""])];
}

function searchView(d, query, wanted) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const list = el("ol", { class: "list", id: "hits" });
  const said = el("p", { class: "quiet", role: "status" }, "Searching…");
  (async () => {
    let hits = 0;
    const blocks = Math.ceil(run.examples / run.block);
    for (let n = 0; n < blocks && words.length; n++) {
      const [texts, parts] = await Promise.all([load(`examples/${n}`), load(`${current}/examples/${n}`)]);
      if (!wanted()) return;
      texts.text.forEach((text, at) => {
        const low = text.toLowerCase();
        if (!words.every((word) => low.includes(word))) return;
        hits += 1;
        if (hits <= MOST) list.append(exampleItem(n * run.block + at, [text, texts.label[at], texts.prediction[at], texts.probability[at]], [`example ${n * run.block + at}`, usedComponents(parts, at)]));
      });
      said.textContent = `${number(hits)} found in ${number(Math.min(run.examples, (n + 1) * run.block))} of ${number(run.examples)} examples`;
    }
    said.textContent = `${number(hits)} of ${number(run.examples)} examples contain every word` + (hits > MOST ? `; the first ${MOST} are shown.` : ".");
  })().catch((error) => { said.textContent = error.message; });
  return [el("h1", {}, "Search"), el("p", {}, "Texts with ", el("span", { class: "chip", dir: "auto" }, visible(query))), said, list];
}
