// Results of a section: whether they are those of the inputs, and what has been checked of them.

import { lamp } from "./dom.js";
import { inputs } from "./inputs.js";
import { CHECKS, checks } from "./reading.js";
import { Problem } from "./request.js";
import { SECTIONS } from "./sections.js";
import { part, sections, state } from "./state.js";

export const requestsOf = (name, values) => SECTIONS[name].requests(values, state.model);
export const secondOf = (name, values) => SECTIONS[name].second?.(values, state.model, sections[name].runs) ?? [];

export const resultsOf = ({ runs }) => runs.flatMap(({ result }) => (result && !(result instanceof ArrayBuffer) ? [result] : []));

// Results of other inputs are marked, and their checks removed.
export function checkStale(name) {
  const section = sections[name];
  const isStale = section.runs.length > 0 && !section.isRunning && !isCurrent(name, section.inputs);
  part(name, "result").classList.toggle("old", isStale);
  part(name, "stale").hidden = !isStale;
  part(name, "stale").textContent = isStale ? "These results are of other inputs: run again." : "";
  part(name, "lamps").replaceChildren(...(isStale ? [] : lampsOf(name)));
}

function isCurrent(name, values) {
  const bodiesOf = (own) => JSON.stringify([...requestsOf(name, own), ...secondOf(name, own)].map(({ path, body }) => [path, body]));
  try {
    return bodiesOf(values) === bodiesOf(inputs());
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return false;
  }
}

// Only results of the gradient routes have something to check.
function lampsOf(name) {
  const gradients = resultsOf(sections[name]).filter(({ wall_ms: time }) => time !== undefined);
  if (!gradients.length) return [];
  return [...checks(gradients, state.model.kind), ...(SECTIONS[name].checks?.(sections[name].runs, state.model) ?? [])]
    .filter(([, passes]) => passes !== null).map(([check, passes, words]) => {
      const item = lamp(check, passes, words);
      item.title = `${CHECKS[check]} Here: ${words}.`;
      return item;
    });
}
