// Runs of a section: its requests one after another, their progress and results.

import { dropCheck } from "./cost.js";
import { byId, element, lamp } from "./dom.js";
import { inputs } from "./inputs.js";
import { showProblem } from "./problems.js";
import { CHECKS, checks } from "./reading.js";
import { ask, Problem } from "./request.js";
import { SECTIONS } from "./sections.js";
import { key, part, sections, state } from "./state.js";

const PROGRESS_AFTER_MS = 1000;

// Milliseconds per request of earlier runs, by name: the expected durations of the next ones.
const durations = {};
// Called with a section when its results have changed.
const listeners = [];
export const onResults = (listener) => listeners.push(listener);

// The requests of a section.
const requestsOf = (name) => SECTIONS[name].requests(inputs(), state.model);
const bodiesOf = (requests) => JSON.stringify(requests.map(({ path, body }) => [path, body]));

export async function run(name) {
  const section = sections[name];
  section.controller?.abort();
  const controller = new AbortController();
  Object.assign(section, { runs: [], asked: null, controller });
  begin(name);
  const stopClock = clock(name, section);
  let current;
  try {
    const requests = requestsOf(name);
    section.requests = requests;
    section.asked = bodiesOf(requests);
    if (!requests.length) throw new Problem(SECTIONS[name].nothing.replace(/\.$/, ""));
    for (current of requests) await one(name, section, current, controller.signal);
  } catch (error) {
    if (section.controller === controller) showProblem(name, "problem", error, current);
  } finally {
    stopClock();
    if (section.controller === controller) end(name, section);
  }
}

async function one(name, section, request, signal) {
  section.running = { ...request, started: performance.now() };
  try {
    const result = await ask(request.path, request.body, key(), signal);
    section.runs.push({ ...request, result });
  } catch (error) {
    if (!request.isOptional || !(error instanceof Problem)) throw error;
    section.runs.push({ ...request, problem: `The ${request.name} could not be computed: ${error.message}.` });
  }
  durations[request.name] = performance.now() - section.running.started;
  redraw(name);
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

function end(name, section) {
  section.controller = null;
  section.running = null;
  part(name, "cancel").hidden = true;
  part(name, "go").disabled = false;
  byId(name).ariaBusy = "false";
  checkStale(name);
}

// Show how long the run takes, which request runs, and the estimated share of the whole.
function clock(name, section) {
  const started = performance.now();
  const seconds = () => `${((performance.now() - started) / 1000).toFixed(1)} s`;
  const [panel, bar, text] = [part(name, "progress"), byId(name).querySelector("progress"), part(name, "elapsed")];
  const timer = setInterval(() => {
    const { running, requests } = section;
    if (performance.now() - started < PROGRESS_AFTER_MS || !running) return;
    panel.hidden = false;
    const expected = requests.map((request) => durations[request.name]);
    const done = section.runs.length;
    // A first run has no durations: each request counts the same.
    const weights = expected.every(Number.isFinite) ? expected : expected.map(() => 1);
    const inside = Math.min(0.95, (performance.now() - running.started) / (durations[running.name] ?? 4000));
    const all = weights.reduce((sum, weight) => sum + weight, 0);
    bar.value = (weights.slice(0, done).reduce((sum, weight) => sum + weight, 0) + inside * weights[done]) / all;
    text.textContent = `${seconds()}: ${running.name} (${done + 1} of ${requests.length}), about ${Math.round(100 * bar.value)} %`;
  }, 100);
  return () => {
    clearInterval(timer);
    panel.hidden = true;
    part(name, "cost").textContent = `took ${seconds()}`;
  };
}

export function redraw(name) {
  const { runs } = sections[name];
  const results = runs.flatMap(({ result }) => (result && !(result instanceof ArrayBuffer) ? [result] : []));
  part(name, "lamps").replaceChildren(...(results.some(({ wall_ms: time }) => time !== undefined)
    ? checks(results, state.model.kind).filter(([, passes]) => passes !== null).map(([check, passes, words]) => {
      const item = lamp(check, passes, words);
      item.title = CHECKS[check];
      return item;
    }) : []));
  part(name, "exports").hidden = !runs.length;
  const warnings = [...new Set(results.flatMap((result) => result.warnings ?? []))];
  const drawn = runs.some(({ result }) => result) ? SECTIONS[name].draw(runs, inputs(), state.model) : [];
  part(name, "result").replaceChildren(
    ...warnings.map((warning) => element("p", { className: "warning" }, `Warning: ${warning}.`)),
    ...[drawn].flat());
  for (const listener of listeners) listener(name);
}

// Results of other inputs are marked, and their checks removed.
export function checkStale(name) {
  const section = sections[name];
  if (!section.runs.length || section.controller) return;
  let asked = null;
  try {
    asked = bodiesOf(requestsOf(name));
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
  }
  const isStale = asked !== section.asked;
  if (isStale === part(name, "result").classList.contains("old")) return;
  part(name, "result").classList.toggle("old", isStale);
  part(name, "stale").hidden = !isStale;
  part(name, "stale").textContent = isStale ? "These results are of other inputs: run again." : "";
  if (isStale) part(name, "lamps").replaceChildren();
  else redraw(name);
}
