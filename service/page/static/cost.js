// The cost of a section's requests, and their problems, before they run.

import { listed } from "./dom.js";
import { inputs } from "./inputs.js";
import { sum } from "./numbers.js";
import { showProblem } from "./problems.js";
import { ask } from "./request.js";
import { SECTIONS } from "./sections.js";
import { key, part, sections, state } from "./state.js";

const DRY_RUN_AFTER_MS = 400;

let costTimer;
let costs = new AbortController();

// Check the requests, and show their cost, a moment after the last change.
export function checkSoon(name) {
  clearTimeout(costTimer);
  costTimer = setTimeout(() => check(name), DRY_RUN_AFTER_MS);
}

// A run makes the check and its problem obsolete.
export function dropCheck(name) {
  clearTimeout(costTimer);
  costs.abort();
  part(name, "cost").classList.remove("failed");
  showProblem(name, "cost", null);
}

export async function check(name) {
  if (!SECTIONS[name].hasDryRun || !state.model?.gradients || sections[name].isRunning) return null;
  clearTimeout(costTimer);
  costs.abort();
  costs = new AbortController();
  let current;
  try {
    const found = [];
    for (current of SECTIONS[name].requests(inputs(), state.model)) {
      found.push((await ask(current.path, { ...current.body, dry_run: true }, key(), costs.signal)).cost);
    }
    showProblem(name, "cost", null);
    part(name, "cost").classList.remove("failed");
    part(name, "cost").textContent = found.length ? costSentence(found) : "";
    return sum(found.map(({ token_steps: steps }) => steps));
  } catch (error) {
    if (error.name === "AbortError") return null;
    part(name, "cost").classList.add("failed");
    showProblem(name, "cost", error, current);
    return null;
  }
}

function costSentence(found) {
  const steps = found.map(({ token_steps: number }) => number.toLocaleString("en"));
  return `costs up to ${listed(steps)} of ${found[0].limit.toLocaleString("en")} token steps${found.length > 1 ? " each" : ""}`;
}
