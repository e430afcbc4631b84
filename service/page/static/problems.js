// Problems of requests: sentences that name the field at fault, which is marked.

import { sentenceCase } from "./dom.js";
import { labelOf, markInvalid } from "./inputs.js";
import { Problem } from "./request.js";
import { part } from "./state.js";

export function showProblem(name, className, error, request) {
  const place = part(name, className);
  place.id = `${name}-${className}`;
  const field = error instanceof Problem ? error.field ?? fieldAt(error.pointer, request?.fields ?? {}) : null;
  place.textContent = error ? sentence(error, field) : "";
  markInvalid(field, place);
}

// The input that a JSON pointer is about; the longest known pointer above it.
function fieldAt(pointer, fields) {
  for (let steps = pointer ?? ""; steps; steps = steps.slice(0, steps.lastIndexOf("/"))) {
    if (fields[steps]) return fields[steps];
  }
  return null;
}

function sentence(error, field) {
  if (error.name === "AbortError") return "Cancelled: the service has stopped the job.";
  if (!(error instanceof Problem)) {
    console.error(error);
    return "Internal error of this page; see the browser's console.";
  }
  const where = field === null ? "" : `${labelOf(field)}: `;
  return sentenceCase(`${where}${error.message}.`);
}
