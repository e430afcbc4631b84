// Counterfactuals: words struck out or edited, and the result of the served model before and after.

import { explainedTexts, isCut, nameOf } from "./deletion.js";
import { byId, embedded, listed, muted, shown, signed } from "./dom.js";
import { measure } from "./measure.js";
import { sum } from "./numbers.js";
import { Problem } from "./request.js";
import { number, table } from "./tables.js";
import { key } from "./state.js";
import { beginning, without } from "./tokens.js";

const MEASURE_AFTER_MS = 250;

// The box moves into each drawn result; between two of them it is in no document.
const box = byId("whatif");
const field = (name) => box.querySelector(`[name=${name}]`);
const outcome = box.querySelector(".outcome");
const edited = (side) => field(`edited-${side}`);
// The explained texts with their units, the inputs that they came from, the model and the name of the result.
let shownFor = null;
let changed = () => {};
let timer;
let controller = new AbortController();

// Offer the words of an explained result. Edits survive a new run on the same texts.
export function showWhatIf(runs, inputs, model) {
  const slot = document.querySelector("#explain .slot");
  if (!slot) return;
  const deletion = runs.find(({ key: name }) => name === "deletion");
  const sides = explainedTexts(deletion, model).slice(0, 2).map((text) => ({ ...text, side: text.input, text: text.content }));
  slot.append(box);
  box.hidden = false;
  shownFor = { sides, inputs, model, name: nameOf(deletion) };
  for (const { side, text, by } of sides) {
    const { value, dataset } = edited(side);
    const original = `${by}: ${text}`;
    // The edits in a URL come before the first result; those of another text, or of other units, are obsolete.
    if (value === "" || (dataset.original ?? original) !== original) reset(side, text);
    dataset.original = original;
  }
  for (const side of sides) connectChips(side);
  showStruck();
  update();
}

// Indices of the words of a side that are struck out, kept in an input so that the URL has them.
const struckOf = (side) => field(`struck-${side}`);
const struckWords = (side) => new Set(struckOf(side).value.split(",").filter(Boolean).map(Number));

function reset(side, text) {
  edited(side).value = text ?? "";
  struckOf(side).value = "";
}

const chipsOf = ({ side }) => [...document.querySelectorAll(`#explain [data-side=${side}] .chip`)];

// The words of the explanation themselves are struck out.
function connectChips(side) {
  chipsOf(side).forEach((chip, index) => chip.addEventListener("click", () => {
    const struck = struckWords(side.side);
    if (!struck.delete(index)) struck.add(index);
    struckOf(side.side).value = [...struck].join();
    edited(side.side).value = without(side.text, side.units.filter((_, at) => struck.has(at)));
    showStruck();
    update();
    changed();
  }));
}

function showStruck() {
  for (const side of shownFor.sides) {
    const struck = struckWords(side.side);
    chipsOf(side).forEach((chip, index) => { chip.ariaPressed = String(struck.has(index)); });
  }
}

function update() {
  clearTimeout(timer);
  timer = setTimeout(compare, MEASURE_AFTER_MS);
}

async function compare() {
  const { sides, inputs, model, name: result } = shownFor;
  const problem = box.querySelector(".problem");
  const before = { ...inputs, ...Object.fromEntries(sides.map(({ side, text }) => [side, text ?? ""])) };
  const after = { ...before, ...Object.fromEntries(sides.map(({ side }) => [side, edited(side).value])) };
  controller.abort();
  controller = new AbortController();
  problem.textContent = "";
  try {
    const measured = await measure(before, after, model, result, key(), controller.signal);
    const isEdited = sides.some(({ side }) => before[side] !== after[side]);
    const edits = sides.filter(({ side }) => before[side] !== after[side]).map(({ side }) => `“${embedded(beginning(after[side]))}”`);
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

// What deletion says about the struck words: exact for one of them, if the model reads all of the texts.
function predicted(sides) {
  const gone = sides.flatMap((side) => side.units.filter((_, index) => struckWords(side.side).has(index)));
  if (!gone.length || sides.some(isCut) || gone.some(({ leftOut }) => leftOut === null)) return [];
  const all = sum(gone.map(({ leftOut }) => leftOut));
  return [muted(gone.length === 1
    ? `“${embedded(gone[0].content)}” was left out before: the explanation says ${signed(-all)}.`
    : `The numbers of the ${gone.length} words that are struck out add up to a change of ${signed(-all)}. The sum is not exact, because words act together.`)];
}

export function connectWhatIf(onChange) {
  changed = onChange;
  for (const side of ["a", "b"]) {
    edited(side).addEventListener("input", () => {
      struckOf(side).value = "";
      showStruck();
      update();
    });
  }
  box.querySelector(".undo").addEventListener("click", () => {
    for (const { side, text } of shownFor.sides) reset(side, text);
    showStruck();
    update();
    changed();
  });
}
