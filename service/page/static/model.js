// What the page knows of the served model: from the serving process and, where gradients are enabled, from theirs.

import { ask, Problem, servedPath } from "./request.js";

// The server says whether it has the gradient routes, so that the page need not try.
export const HAS_GRADIENTS = document.querySelector("meta[name=gradients]").content === "enabled";

const KINDS = { pooled: "embedding", sparse: "sparse", multi: "multi", tags: "tags", spans: "tags" };
export const kindOf = ({ outputs: [output], labels }) =>
  KINDS[output] ?? (labels.length === 1 ? "reranker" : "classifier");

// `gradients` are the capabilities of the gradient routes, null until they have arrived; `problem` says why they do not.
export async function servedModel(key) {
  const info = await ask(servedPath("info"), null, key);
  return {
    name: info.model, kind: kindOf(info), similarity: info.similarity, labels: info.labels, prompts: info.prompts,
    info, gradients: null, problem: HAS_GRADIENTS ? null : "they need VITRINE_DEBUG__ENABLED=true and PyTorch",
  };
}

// Starts the gradient process, which can take long.
export async function loadGradients(model, key) {
  try {
    model.gradients = await ask(servedPath("debug/capabilities"), null, key);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    model.problem = error.message.replace(/^./u, (first) => first.toLowerCase());
  }
}
