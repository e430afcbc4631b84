// Counterfactuals: words struck out or edited, and the result of the served model before and after.

import { rowsOf } from "./attribution.js";
import { byId, element, listed, muted, shown, signed } from "./dom.js";
import { measure } from "./measure.js";
import { pairsOf } from "./pairs.js";
import { Problem } from "./request.js";
import { rove } from "./roving.js";
import { number, table } from "./tables.js";
import { key } from "./state.js";
import { slice } from "./tokens.js";

const MEASURE_AFTER_MS = 250;

// The box moves into each drawn result; between two of them it is in no document.
const box = byId("whatif");
const field = (name) => box.querySelector(`[name=${name}]`);
const outcome = box.querySelector(".outcome");
const edited = (side) => field(`edited-${side}`);
// The explained texts, their words with scores, and the inputs that they came from.
let shownFor = null;
let changed = () => {};
let timer;
let controller = new AbortController();

// Offer the words of an explained result. Edits survive a new run on the same texts.
export function showWhatIf(runs, inputs, model) {
  const sides = sidesOf(runs);
  const slot = document.querySelector("#explain .slot");
  if (!slot || !sides.length) return;
  slot.append(box);
  box.hidden = false;
  shownFor = { sides, inputs, model };
  for (const { side, text } of sides) {
    const { value, dataset } = edited(side);
    // The edits in a URL come before the first result; those of another text are obsolete.
    if (value === "" || (dataset.original ?? text) !== text) reset(side, text);
    dataset.original = text;
  }
  drawWords();
  update();
}

// The words of each text, with the sum of their scores if they have been attributed.
function sidesOf(runs) {
  const pair = runs.find(({ key: name, result }) => name === "pair" && result);
  const target = runs.find(({ key: name, result }) => name === "target" && result);
  const scores = (side) => runs.find(({ key: name, result }) => name === side && result);
  const words = (row) => row.filter(({ text }) => text !== null);
  if (pair) {
    const units = pairsOf(pair, "words");
    return ["a", "b"].map((side) => ({
      side, text: pair.body[side], tokens: pair.result[`tokens_${side}`],
      words: words(scores(side) ? rowsOf(scores(side), "words")[0] : units[side]),
    }));
  }
  if (!target) return [];
  return rowsOf(target, "words").slice(0, 2).map((row, index) => ({
    side: "ab"[index], text: [target.body.text, target.body.text_pair][index], tokens: target.result.tokens, words: words(row),
  }));
}

const spanOf = ({ tokens }, word) => ({ start: tokens[word.tokens[0]].start, end: tokens[word.tokens.at(-1)].end });

// Indices of the words of a side that are struck out, kept in an input so that the URL has them.
const struckOf = (side) => field(`struck-${side}`);
const struckWords = (side) => new Set(struckOf(side).value.split(",").filter(Boolean).map(Number));

function reset(side, text) {
  edited(side).value = text ?? "";
  struckOf(side).value = "";
}

function drawWords() {
  box.querySelector(".words").replaceChildren(...shownFor.sides.map((side) => {
    const struck = struckWords(side.side);
    const buttons = side.words.map((word, index) => {
      const button = element("button", { type: "button", className: "strike", aria: { pressed: String(struck.has(index)) } }, word.content);
      button.addEventListener("click", () => {
        if (!struck.delete(index)) struck.add(index);
        button.ariaPressed = String(struck.has(index));
        struckOf(side.side).value = [...struck].join();
        edited(side.side).value = without(side, struck);
        update();
        changed();
      });
      return button;
    });
    const name = edited(side.side).closest("label").querySelector(".name:not([hidden])").textContent.replace(", edited", "");
    const bar = element("div", { className: "strikes", role: "toolbar", aria: { label: `Words of ${name}: strike out` } }, ...buttons);
    rove(bar, buttons);
    return element("div", {}, element("h4", {}, name), bar);
  }));
}

// The text without the struck words, and without the white space that they leave.
function without(side, struck) {
  const removed = side.words.filter((_, index) => struck.has(index)).map((word) => spanOf(side, word));
  const ends = [0, ...removed.map(({ end }) => end)];
  const starts = [...removed.map(({ start }) => start), [...side.text].length];
  return ends.map((start, index) => slice(side.text, { start, end: starts[index] })).join("").replace(/\s+/g, " ").trim();
}

function update() {
  clearTimeout(timer);
  timer = setTimeout(compare, MEASURE_AFTER_MS);
}

async function compare() {
  const { sides, inputs, model } = shownFor;
  const problem = box.querySelector(".problem");
  const before = { ...inputs, ...Object.fromEntries(sides.map(({ side, text }) => [side, text ?? ""])) };
  const after = { ...before, ...Object.fromEntries(sides.map(({ side }) => [side, edited(side).value])) };
  controller.abort();
  controller = new AbortController();
  problem.textContent = "";
  try {
    const measured = await measure(before, after, model, key(), controller.signal);
    const isEdited = sides.some(({ side }) => before[side] !== after[side]);
    const edits = sides.filter(({ side }) => before[side] !== after[side]).map(({ side }) => `“${after[side]}”`);
    outcome.replaceChildren(
      ...(isEdited ? [muted(`With ${listed(edits)}:`)] : []),
      ...(isEdited ? [table("Result of the served model", ["Result", "Before", "After", "Difference"], measured.map(row)), ...predicted(sides)] : [
        muted(`Now: ${measured.map(({ name, before: value }) => `${name} ${typeof value === "string" ? value : shown(value)}`).join(", ")}. Nothing is struck out or edited.`)]));
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    outcome.replaceChildren();
    problem.textContent = `The edited texts: ${error.message}.`;
  }
}

function row({ name, before, after }) {
  if (typeof before === "string") return [name, before, after, before === after ? "the same" : "changed"];
  return [name, number(before), number(after), number(after - before, signed(after - before))];
}

// What the scores of the struck words say about the effect of removing them.
function predicted(sides) {
  const gone = sides.flatMap(({ side, words }) => words.filter((_, index) => struckWords(side).has(index)));
  if (!gone.length || gone.some(({ score }) => score === undefined)) return [];
  const sum = gone.reduce((total, { score }) => total + score, 0);
  return [muted(`The scores of the words that are struck out add up to ${signed(sum)}: their removal was expected to change the result by about ${signed(-sum)}.`)];
}

export function connectWhatIf(onChange) {
  changed = onChange;
  for (const side of ["a", "b"]) {
    edited(side).addEventListener("input", () => {
      struckOf(side).value = "";
      drawWords();
      update();
    });
  }
  box.querySelector(".undo").addEventListener("click", () => {
    for (const { side, text } of shownFor.sides) reset(side, text);
    drawWords();
    update();
    changed();
  });
}
