// Runs of a section: its requests one after another, their progress and results.

import { dropCheck } from "./cost.js";
import { byId, element, problemsOf } from "./dom.js";
import { inputs } from "./inputs.js";
import { sum } from "./numbers.js";
import { showProblem } from "./problems.js";
import { ask, Problem } from "./request.js";
import { checkStale, requestsOf, resultsOf, secondOf } from "./results.js";
import { SECTIONS } from "./sections.js";
import { key, part, sections, state } from "./state.js";

const PROGRESS_AFTER_MS = 1000;
// Of a run with many requests; drawing costs time too.
const MOST_DRAWS = 50;

// Milliseconds per request of earlier runs, by name: the expected durations of the next ones.
const durations = {};
// Called with a section when its results have changed.
const listeners = [];
export const onResults = (listener) => listeners.push(listener);

export async function run(name) {
  const section = sections[name];
  section.controller?.abort();
  Object.assign(section, { runs: [], inputs: inputs(), controller: new AbortController(), isRunning: true, isSecond: false });
  begin(name);
  const { controller } = section;
  await inTurn(name, () => {
    const requests = requestsOf(name, section.inputs);
    if (!requests.length) throw new Problem(SECTIONS[name].nothing.replace(/\.$/, ""));
    return requests;
  }, () => redraw(name));
  if (section.controller !== controller) return;
  section.isRunning = false;
  part(name, "cancel").hidden = true;
  part(name, "go").disabled = false;
  byId(name).ariaBusy = "false";
  checkStale(name);
  await runSecond(name);
}

// The second opinion on the results of a section, which does not delay them. It can become available after them.
export async function runSecond(name) {
  const section = sections[name];
  if (section.isRunning || section.isSecond || section.controller?.signal.aborted) return;
  const requests = secondOf(name, section.inputs);
  if (requests.length) {
    section.isSecond = true;
    section.runs = section.runs.filter(({ isSecond }) => !isSecond);
    part(name, "cancel").hidden = false;
    const { controller } = section;
    await inTurn(name, () => requests, () => redrawSecond(name));
    if (section.controller !== controller) return;
    section.isSecond = false;
    part(name, "cancel").hidden = true;
  }
  redrawSecond(name);
}

async function inTurn(name, requestsNow, draw) {
  const section = sections[name];
  const { controller } = section;
  let stopClock = () => {};
  let current;
  let drawn = 0;
  let finished = 0;
  const show = () => {
    drawn = section.runs.length;
    draw();
  };
  try {
    const requests = requestsNow();
    stopClock = clock(name, section, requests, () => finished);
    show();
    const every = Math.ceil(requests.length / MOST_DRAWS);
    for (const [index, request] of requests.entries()) {
      current = request;
      const { result } = await one(section, request, controller.signal);
      finished += 1;
      if (result && request.more) requests.splice(finished, 0, ...request.more(result));
      if (index % every === 0 || index === requests.length - 1) show();
    }
  } catch (error) {
    if (section.controller !== controller) return;
    showProblem(name, "problem", error, current);
    if (section.runs.length > drawn) show();
  } finally {
    stopClock();
  }
}

async function one(section, request, signal) {
  section.running = { ...request, started: performance.now() };
  const settled = { ...request };
  try {
    settled.result = await ask(request.path, request.body, key(), signal);
  } catch (error) {
    if (!request.isOptional || !(error instanceof Problem) || (request.isOneOfMany && error.concernsAll)) throw error;
    settled.problem = `The ${request.name} could not be computed: ${error.message}.`;
  }
  section.runs.push(settled);
  durations[request.name] = performance.now() - section.running.started;
  return settled;
}

function begin(name) {
  part(name, "cancel").hidden = false;
  part(name, "go").disabled = true;
  part(name, "curl").hidden = true;
  part(name, "stale").hidden = true;
  showProblem(name, "problem", null);
  dropCheck(name);
  redraw(name);
  byId(name).ariaBusy = "true";
}

// Show how long the requests take, which one runs, and the estimated share of the whole.
function clock(name, section, requests, finished) {
  const started = performance.now();
  const seconds = () => `${((performance.now() - started) / 1000).toFixed(1)} s`;
  const [panel, bar, text] = [part(name, "progress"), byId(name).querySelector("progress"), part(name, "elapsed")];
  const timer = setInterval(() => {
    const { running } = section;
    if (performance.now() - started < PROGRESS_AFTER_MS || !running) return;
    panel.hidden = false;
    const expected = requests.map((request) => durations[request.name]);
    const done = finished();
    // A first run has no durations: each request counts the same.
    const weights = expected.every(Number.isFinite) ? expected : expected.map(() => 1);
    const inside = Math.min(0.95, (performance.now() - running.started) / (durations[running.name] ?? 4000));
    bar.value = (sum(weights.slice(0, done)) + inside * weights[done]) / sum(weights);
    text.textContent = `${seconds()}: ${running.name} (${done + 1} of ${requests.length}), about ${Math.round(100 * bar.value)} %`;
  }, 100);
  return () => {
    clearInterval(timer);
    panel.hidden = true;
    if (!section.isSecond) part(name, "cost").textContent = `took ${seconds()}`;
  };
}

export function redraw(name) {
  const section = sections[name];
  const { runs } = section;
  part(name, "exports").hidden = !runs.length;
  const warnings = [...new Set(resultsOf(section).flatMap((result) => result.warnings ?? []))];
  const drawn = runs.some(({ result }) => result) ? SECTIONS[name].draw(runs, inputs(), state.model, state.models) : problemsOf(runs);
  part(name, "result").replaceChildren(
    ...warnings.map((warning) => element("p", { className: "warning" }, `Warning: ${warning}.`)),
    ...[drawn].flat());
  redrawSecond(name);
  for (const listener of listeners) listener(name);
}

// The second opinion has a place of its own in the result: the rest keeps its focus and its edits.
function redrawSecond(name) {
  const section = sections[name];
  const place = part(name, "result").querySelector(".second");
  if (place) {
    const { gradients, problem } = state.model;
    const awaitsGradients = SECTIONS[name].checks && !(gradients || problem);
    const isPending = Boolean(section.isRunning || section.isSecond || awaitsGradients);
    place.replaceChildren(...SECTIONS[name].drawSecond(section.runs, state.model, isPending));
    place.ariaBusy = String(isPending);
  }
  checkStale(name);
}
