// The served models.

import { byId, element } from "./dom.js";
import { kindOf } from "./model.js";
import { showRankingModels } from "./rank_whatif.js";
import { MODEL, servedModels } from "./request.js";
import { SECTIONS } from "./sections.js";
import { key, state } from "./state.js";

// With several models, link to the page of each, and offer the others for comparison, if `isCurrent` after the request.
export async function showModels(isCurrent) {
  const models = await servedModels(key());
  if (!isCurrent()) return;
  state.models = models;
  const chosen = state.model?.name ?? MODEL;
  byId("models").replaceChildren(...(models.length < 2 ? [] : models.map(({ name }) =>
    element("a", { href: `debug?model=${encodeURIComponent(name)}`, aria: { current: name === chosen } }, name))));
  const othersIn = (section) => models.filter((model) => model.name !== chosen && SECTIONS[section].kinds.includes(kindOf(model)));
  showRankingModels(othersIn("rank"));
  const others = document.querySelector("[name=other]");
  const { value } = others;
  others.replaceChildren(...othersIn("compare").map(({ name }) => element("option", {}, name)));
  if ([...others.options].some((option) => option.value === value)) others.value = value;
  byId("one-model").hidden = others.length > 0;
  byId("compared").hidden = others.length === 0;
}
