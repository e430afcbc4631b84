// Entries with large weights in a text's sparse vector, to choose one as the target.

import { byId, element, shown } from "./dom.js";
import { setInput } from "./inputs.js";
import { ask, Problem } from "./request.js";

const REQUEST_AFTER_MS = 400;

let timer;
let requested = null;

// List the entries a moment after the last change of the text.
export function showEntriesSoon(text, key) {
  clearTimeout(timer);
  if (text === requested) return;
  timer = setTimeout(() => showEntries(text, key), REQUEST_AFTER_MS);
}

async function showEntries(text, key) {
  requested = text;
  const entries = await entriesOf(text, key).catch((error) => {
    if (!(error instanceof Problem)) throw error;
    return null; // the check of the run names the problem
  });
  if (text !== requested) return;
  if (!entries) requested = null;
  byId("vocabulary").replaceChildren(...(entries ?? []).map(([token, weight]) => {
    const button = element("button", { type: "button", className: "quiet" }, token, " ", element("small", {}, shown(weight, 2)));
    button.addEventListener("click", () => setInput("token", token));
    return button;
  }));
}

// The vector has the weights, and the terms of the text's score with itself the spelling in the vocabulary. Prompts of
// queries and documents can give terms to other entries than the ten with the largest weights.
async function entriesOf(text, key) {
  const [{ embeddings: [{ ids, weights }] }, { explanations: [{ terms }] }] = await Promise.all([
    ask("encode", { inputs: [text] }, key),
    ask("score", { queries: text, documents: [text], explain: { method: "terms" } }, key),
  ]);
  const weightOf = new Map(ids.map((id, index) => [id, weights[index]]));
  return terms.filter(({ document }) => weightOf.has(document.id))
    .map(({ document }) => [document.token, weightOf.get(document.id)]).sort(([, one], [, other]) => other - one);
}
