// Opening the ranking of a query and passages from elsewhere on the page.

import { byId } from "./dom.js";
import { setInput } from "./inputs.js";
import { writePassages } from "./rank_passages.js";

// Fill the view with a query and texts, or objects with `text` and `id`; mark the passage of index `expected`, if
// any, as the one that should be first; and rank them.
export function openRanking(query, passages, expected = null) {
  setInput("query", query);
  setInput("passages", writePassages(passages.map((passage) => ({ text: passage.text ?? passage, id: passage.id ?? null }))));
  setInput("expected", expected ?? "");
  byId("tab-rank").click();
  byId("rank").dispatchEvent(new Event("rank"));
}
