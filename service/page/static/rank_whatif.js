// Counterfactuals of a ranking: passages struck out or edited, another query, chunks, prompt or model. The list keeps its
// order, and each row has its new score and rank beside the old ones.

import { byId, element, muted, sentenceCase, sentences } from "./dom.js";
import { setInput, setValue } from "./inputs.js";
import { orderOf } from "./numbers.js";
import { rankingOf } from "./rank.js";
import { changesOf, saidOf } from "./rank_changes.js";
import { readEdits } from "./rank_passages.js";
import { ask, Problem } from "./request.js";
import { scoreBody } from "./questions.js";
import { key, sections, state } from "./state.js";
import { without } from "./tokens.js";

const MEASURE_AFTER_MS = 250;

const box = byId("rank-whatif");
const option = (name) => box.querySelector(`[data-option=${name}]`);
const [query, prompt, other] = ["query", "prompt", "model"].map(option);
const OPTIONS = ["size", "overlap", "prompt", "model"];
const outcome = box.querySelector(".outcome");
const stated = box.querySelector(".problem");
// The edited texts by index of the passage, and the indices of the units that are struck out.
const [texts, struck] = [new Map(), new Map()];
let ranking = null;
let after = null; // the scores and ranks after the edits; null: not measured
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
    const isFirst = ranking === null;
    ranking = drawn;
    after = null;
    reset();
    (isFirst ? readStored : store)();
  }
  // Others than rerankers have no other prompts than those of queries and documents, which they always use.
  prompt.closest("label").hidden = state.model.kind !== "reranker" || prompt.options.length < 2;
  showEdits();
  showAfter();
}

// Offer other models of the service.
export function showRankingModels(models) {
  const { value } = other;
  other.replaceChildren(element("option", { value: "" }, "this model"), ...models.map(({ name }) => element("option", {}, name)));
  other.closest("label").hidden = other.options.length < 2;
  setValue(other, value);
}

function reset() {
  controller.abort();
  clearTimeout(timer);
  texts.clear();
  struck.clear();
  query.value = ranking.query;
  for (const name of OPTIONS) option(name).value = "";
}

// The edits are kept in an input, so that the URL has them.
function store() {
  const edits = {
    query: query.value, ...Object.fromEntries(OPTIONS.map((name) => [name, option(name).value])),
    texts: [...texts], struck: [...struck].map(([index, units]) => [index, [...units]]),
  };
  setInput("rank-edits", texts.size || concernAll() ? JSON.stringify(edits) : "");
}

function readStored() {
  const edits = readEdits(document.querySelector("[name=rank-edits]").value || "{}");
  if (!edits) {
    stated.textContent = "The edits in the URL cannot be read.";
    return;
  }
  for (const [index, text] of edits.texts) if (ranking.passages[index]) texts.set(index, text);
  for (const [index, units] of edits.struck) struck.set(index, units);
  query.value = edits.query ?? ranking.query;
  for (const name of OPTIONS) setValue(option(name), edits[name] ?? "");
  update();
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
  store();
  clearTimeout(timer);
  timer = setTimeout(measure, MEASURE_AFTER_MS);
}

export function showEdits() {
  for (const row of document.querySelectorAll("#rank .row")) {
    const index = Number(row.dataset.index);
    row.querySelectorAll(".unit").forEach((unit, at) => { unit.ariaPressed = String(Boolean(struck.get(index)?.has(at))); });
    row.querySelector("[data-action=undo]").hidden = !texts.has(index);
  }
}

function optionsNow() {
  const [size, overlap, named, model] = OPTIONS.map((name) => option(name).value);
  return {
    ...((size || overlap) && { chunking: { size: size ? Number(size) : null, overlap: Number(overlap) } }),
    ...(named && { prompt_name: named }),
    ...(model && { model, raw_scores: true }), // of other models than rerankers they are the scores
  };
}

const concernAll = () => query.value !== ranking.query || Object.keys(optionsNow()).length > 0;

// Edited passages are scored alone; a change of anything else concerns all.
async function measure() {
  controller.abort();
  controller = new AbortController();
  const concernsAll = concernAll();
  const indices = concernsAll ? ranking.scores.map((_, index) => index) : [...texts.keys()];
  stated.textContent = "";
  after = null;
  if (!indices.length) return showAfter();
  const body = { ...scoreBody(query.value, indices.map((index) => texts.get(index) ?? ranking.passages[index].text), state.model), ...optionsNow() };
  try {
    const result = await ask("score", body, key(), controller.signal);
    const scores = [...ranking.scores];
    indices.forEach((index, at) => { scores[index] = result.scores[at]; });
    after = { scores, order: orderOf(scores), indices, chunks: result.best_chunks, texts, concernsAll };
    showAfter();
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    showAfter();
    stated.textContent = sentenceCase(`${error.message}.`);
  }
}

function showAfter() {
  const changes = changesOf(ranking, after);
  for (const { index, words } of changes) {
    const row = rowOf(index);
    if (row) row.querySelector(".after").textContent = words;
  }
  // The scores are missing if their request has failed.
  const hasEdits = texts.size > 0 || concernAll();
  box.querySelector(".undo-all").hidden = !hasEdits;
  outcome.replaceChildren(...(after ? [sentences(saidOf(ranking, after, changes))] : hasEdits ? [] : [muted("Nothing is struck out or edited.")]));
}
