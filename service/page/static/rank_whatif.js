// Counterfactuals of a ranking: passages struck out or edited, another query, chunks, prompt or model. The list keeps its
// order, and each row has its new score and rank beside the old ones.

import { quoted } from "./deletion.js";
import { byId, element, muted, sentenceCase, sentences } from "./dom.js";
import { figure } from "./rank_row.js";
import { nameOfPassage, orderOf, rankingOf } from "./rank.js";
import { ask, Problem } from "./request.js";
import { scoreBody } from "./questions.js";
import { key, sections, state } from "./state.js";
import { slice, without } from "./tokens.js";

const MEASURE_AFTER_MS = 250;

const box = byId("rank-whatif");
const [query, size, overlap, prompt, other] = ["query", "size", "overlap", "prompt", "model"].map((name) => box.querySelector(`[data-option=${name}]`));
const outcome = box.querySelector(".outcome");
// The edited texts by index of the passage, and the indices of the units that are struck out.
const texts = new Map();
const struck = new Map();
let ranking = null;
// The scores and ranks after the edits; null: not measured.
let after = null;
let timer;
let controller = new AbortController();

// Offer the edits of a drawn ranking. Those of the same ranking, drawn again, are kept.
export function showRankingEdits() {
  const slot = document.querySelector("#rank .whatif");
  if (!slot) return;
  slot.append(box);
  box.hidden = false;
  const drawn = rankingOf(sections.rank.runs);
  if (drawn.run !== ranking?.run) {
    ranking = drawn;
    after = null;
    reset();
  }
  // Others than rerankers have no other prompts than those of queries and documents, which they always use.
  prompt.closest("label").hidden = state.model.kind !== "reranker" || prompt.options.length < 2;
  showEdits();
  showAfter();
}

// Offer the other models of the service.
export function showRankingModels(models, chosen) {
  const { value } = other;
  other.replaceChildren(element("option", { value: "" }, "this model"), ...models.filter(({ name }) => name !== chosen).map(({ name }) => element("option", {}, name)));
  other.closest("label").hidden = other.options.length < 2;
  other.value = value;
}

function reset() {
  controller.abort();
  clearTimeout(timer);
  texts.clear();
  struck.clear();
  query.value = ranking.query;
  for (const option of [size, overlap, prompt, other]) option.value = "";
}

const rowOf = (index) => document.querySelector(`#rank .row[data-index="${index}"]`);

export function strike(unit) {
  const row = unit.closest(".row");
  const index = Number(row.dataset.index);
  const units = [...row.querySelectorAll(".unit")];
  const own = struck.get(index) ?? new Set();
  if (!own.delete(units.indexOf(unit))) own.add(units.indexOf(unit));
  struck.set(index, own);
  const spans = rankingOf(sections.rank.runs).explanations.get(index).units;
  setText(index, without(ranking.passages[index].text, spans.filter((_, at) => own.has(at))));
}

export function openEditor(button) {
  const editor = button.closest(".row").querySelector(".editor");
  editor.hidden = !editor.hidden;
  button.ariaExpanded = String(!editor.hidden);
  if (editor.hidden) return;
  const index = Number(button.closest(".row").dataset.index);
  const field = editor.querySelector("textarea");
  field.value = texts.get(index) ?? ranking.passages[index].text;
  field.focus();
}

// An edit by hand replaces what was struck out.
export function edit(field) {
  const index = Number(field.closest(".row").dataset.index);
  struck.delete(index);
  setText(index, field.value);
}

export function undo(index) {
  struck.delete(index);
  setText(index, ranking.passages[index].text);
}

function setText(index, text) {
  if (text === ranking.passages[index].text) texts.delete(index);
  else texts.set(index, text);
  const field = rowOf(index).querySelector(".editor textarea");
  if (document.activeElement !== field) field.value = text;
  update();
}

export function undoAll() {
  const edited = [...texts.keys()];
  reset();
  edited.forEach(undo);
  update();
}

export function update() {
  showEdits();
  clearTimeout(timer);
  timer = setTimeout(measure, MEASURE_AFTER_MS);
}

function showEdits() {
  for (const row of document.querySelectorAll("#rank .row")) {
    const index = Number(row.dataset.index);
    row.querySelectorAll(".unit").forEach((unit, at) => { unit.ariaPressed = String(Boolean(struck.get(index)?.has(at))); });
    row.querySelector("[data-action=undo]").hidden = !texts.has(index);
  }
}

const optionsNow = () => ({
  ...((size.value || overlap.value) && { chunking: { size: size.value ? Number(size.value) : null, overlap: Number(overlap.value) } }),
  ...(prompt.value && { prompt_name: prompt.value }),
  ...(other.value && { model: other.value }),
});

const concernAll = () => query.value !== ranking.query || Object.keys(optionsNow()).length > 0;

// Edited passages are scored alone; a change of anything else concerns all.
async function measure() {
  controller.abort();
  controller = new AbortController();
  const concernsAll = concernAll();
  const indices = concernsAll ? ranking.scores.map((_, index) => index) : [...texts.keys()];
  box.querySelector(".problem").textContent = "";
  after = null;
  if (!indices.length) return showAfter();
  const body = { ...scoreBody(query.value, indices.map((index) => texts.get(index) ?? ranking.passages[index].text), state.model), ...optionsNow() };
  try {
    const result = await ask("score", body, key(), controller.signal);
    const scores = [...ranking.scores];
    indices.forEach((index, at) => { scores[index] = result.scores[at]; });
    after = { scores, order: orderOf(scores), indices, chunks: result.best_chunks, concernsAll };
    showAfter();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    showAfter();
    box.querySelector(".problem").textContent = `${error.message}.`;
  }
}

function showAfter() {
  const changes = ranking.order.map(changeOf);
  for (const { index, words } of changes) {
    const row = rowOf(index);
    if (row) row.querySelector(".after").textContent = words;
  }
  // The scores are missing if their request has failed.
  const hasEdits = texts.size > 0 || concernAll();
  box.querySelector(".undo-all").hidden = !hasEdits;
  outcome.replaceChildren(...(after ? [sentences(saidOf(changes))] : hasEdits ? [] : [muted("Nothing is struck out or edited.")]));
}

// Each edited passage, or what becomes of the list.
function saidOf(changes) {
  const { concernsAll, order: [first], scores } = after;
  const moved = changes.filter(({ place, rank }) => rank !== place + 1).length;
  const edited = changes.filter(({ index }) => texts.has(index)).map(({ index, place, words }) =>
    `${sentenceCase(nameOfPassage(ranking.passages, index))}: ${words}; before ${figure(ranking.scores[index])}, rank ${place + 1}.`);
  if (!concernsAll) return edited;
  return [`${sentenceCase(nameOfPassage(ranking.passages, first))} is first, with ${figure(scores[first])}. ${moved} of ${changes.length} passages change their rank.`, ...edited];
}

function changeOf(index, place) {
  const isMeasured = after?.indices.includes(index);
  const rank = after ? after.order.indexOf(index) + 1 : place + 1;
  const words = isMeasured ? `now ${figure(after.scores[index])}, rank ${rank}${chunkOf(index)}` : rank !== place + 1 ? `now rank ${rank}` : "";
  return { index, place, rank, words };
}

function chunkOf(index) {
  const { chunks, indices } = after;
  const chunk = chunks?.[indices.indexOf(index)];
  return chunk ? `, best chunk ${quoted({ content: slice(texts.get(index) ?? ranking.passages[index].text, chunk) })}` : "";
}
