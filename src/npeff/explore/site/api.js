// Talks to `npeff explore`, where it serves this page.
"use strict";

async function request(path, options) {
  let answer;
  try {
    answer = await fetch(`api/${path}`, { cache: "no-store", ...options });
  } catch {
    throw new Error("Nobody answers. Is npeff explore still running?");
  }
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(value.error || `The server says ${answer.status}.`);
  return { status: answer.status, value };
}

const ask = async (path, query) => (await request(`${path}?${new URLSearchParams(query)}`)).value;
const tell = (path, value) => request(path, { method: "POST", headers: { "Content-Type": "application/json", "X-Npeff": "page" }, body: JSON.stringify(value) });
