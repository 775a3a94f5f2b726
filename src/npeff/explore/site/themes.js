// Themes and notes that people give to components: from the export, or from the server, which takes edits.
"use strict";

// Component → what is said about it {component, theme, note, who, when, source}; `user` is who edits if no name is
// given. Where they cannot be read the page goes on without, and `problem` says why.
async function themesOf(d) {
  try {
    const { themes, user } = SERVED ? await ask("state", { decomposition: d.name })
      : { themes: await load(`${run.decompositions.indexOf(d)}/themes`) };
    return Object.assign(new Map(themes.map((theme) => [theme.component, theme])), { user });
  } catch (error) {
    return Object.assign(new Map(), { problem: error.message });
  }
}

const themeText = (said) => (said && said.theme ? visible(said.theme) : "");
function themeChip(said) {
  if (!themeText(said)) return null;
  return el("span", { class: isAutomatic(said) ? "theme automatic" : "theme", dir: "auto", title: signature(said) }, themeText(said));
}
const isAutomatic = (said) => said.source !== "person";
const signature = (said) => `${isAutomatic(said) ? visible(said.source) : visible(said.who)}, ${said.when.replace("T", " ").slice(0, 16)} UTC`;

const drafts = new Map(); // what is typed and not saved yet, so that a look at another page does not cost it
window.addEventListener("beforeunload", (event) => { if (drafts.size) event.preventDefault(); });

// The section of a component's page; the theme itself stands in `title`, beside the name.
function themeSection(page, { d, j, themes, title }) {
  if (themes.problem) return el("p", { class: "problem", role: "alert" }, `Themes cannot be shown. ${visible(themes.problem)}`);
  if (!SERVED && !themes.has(j)) return null;
  const box = el("section", { class: "card said", "aria-label": "Theme and note" });
  const key = `${d.name}/${j}`;

  function read() {
    const said = themes.get(j);
    title.replaceChildren(themeChip(said) || "");
    box.replaceChildren(...[
      said && said.note ? el("p", { class: "text", dir: "auto", id: "note" }, visible(said.note)) : null,
      el("div", { class: "tools" },
        SERVED ? el("button", { type: "button", id: "edit", onclick: edit }, said ? "Edit theme and note" : "Give it a theme") : null,
        said ? el("span", { class: "quiet small", dir: "auto" }, `${isAutomatic(said) ? "automatic: " : ""}${signature(said)}`)
          : el("span", { class: "quiet small" }, "What do its examples have in common? Say it in a few words.")),
      SERVED && said ? earlier() : null,
    ].filter(Boolean));
  }

  function earlier() {
    const list = el("ul", { class: "list" });
    const details = el("details", { ontoggle: async () => {
      if (!details.open) return;
      try {
        const all = await ask("history", { decomposition: d.name, component: j });
        list.replaceChildren(...all.reverse().map((old) => el("li", {}, themeChip(old) || el("span", { class: "quiet" }, old.note ? "no theme" : "removed"),
          " ", el("span", { class: "quiet small", dir: "auto" }, signature(old)), old.note ? el("div", { class: "text small", dir: "auto" }, visible(old.note)) : null)));
      } catch (error) {
        list.replaceChildren(el("li", {}, error.message));
      }
    } }, el("summary", { class: "small" }, "All that was said"), list);
    return details;
  }

  function edit() {
    const draft = drafts.get(key) || { theme: themes.has(j) ? themes.get(j).theme : "", note: themes.has(j) ? themes.get(j).note : "" };
    const theme = el("input", { id: "theme-input", maxlength: 200, autocomplete: "off", dir: "auto", placeholder: "as: praise that turns into blame" });
    const note = el("textarea", { id: "note-input", maxlength: 10000, rows: 4, dir: "auto" });
    const who = el("input", { id: "who-input", maxlength: 100, autocomplete: "name", dir: "auto", placeholder: visible(themes.user) });
    theme.value = draft.theme;
    note.value = draft.note;
    who.value = remembered("npeff-who") || "";
    const status = el("span", { role: "status", class: "quiet small" });
    const save = el("button", { type: "submit", class: "primary" }, "Save");
    const close = () => { drafts.delete(key); read(); if ($("edit")) $("edit").focus(); };
    const form = el("form", {
      class: "editor",
      oninput: () => drafts.set(key, { theme: theme.value, note: note.value }),
      onkeydown: (event) => {
        if (event.key === "Escape") { event.preventDefault(); close(); }
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); form.requestSubmit(); }
      },
      onsubmit: async (event) => {
        event.preventDefault();
        save.disabled = true;
        status.textContent = "Saving…";
        try {
          const given = who.value.trim();
          remember("npeff-who", given);
          const { value } = await tell("theme", { decomposition: d.name, component: j, theme: theme.value, note: note.value, ...(given ? { who: given } : {}) });
          if (value.theme || value.note) themes.set(j, value);
          else themes.delete(j);
          close();
        } catch (error) {
          status.textContent = `Not saved. ${error.message}`;
          save.disabled = false;
        }
      },
    },
    el("label", {}, "Theme", theme),
    el("label", {}, "Note", note),
    el("label", {}, "Your name", who),
    el("div", { class: "tools" }, save, el("button", { type: "button", onclick: close }, "Cancel"), status,
      el("span", { class: "quiet small" }, "Ctrl+Enter saves, Escape cancels; both empty removes.")));
    box.replaceChildren(form);
    theme.focus();
  }

  read();
  if (SERVED && drafts.has(key)) edit();
  return box;
}
