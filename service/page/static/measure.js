// Results of the served model for texts before and after an edit, by kind of model.

import { SIMILARITIES } from "./reading.js";
import { secondText, TARGETS } from "./questions.js";
import { ask } from "./request.js";

// Return rows of a name, and the result before and after.
export const measure = (before, after, model, key, signal) =>
  MEASURES[model.kind](before, after, (path, body) => ask(path, body, key, signal), model);

const place = (score, other) => (score >= other ? "1st of 2" : "2nd of 2");

async function scores(before, after, post, name, options) {
  const pairs = [before, after].flatMap(({ a, b, c }) => [[a, b], ...(c ? [[a, c]] : [])]);
  const { scores: all } = await post("score", { queries: pairs.map(([query]) => query), documents: pairs.map(([, document]) => document), ...options });
  const [first, second] = [all.slice(0, all.length / 2), all.slice(all.length / 2)];
  const rows = [{ name, before: first[0], after: second[0] }];
  if (first.length === 1) return rows;
  return [...rows,
    { name: `${name} of the other document`, before: first[1], after: second[1] },
    { name: "rank of the document", before: place(...first), after: place(...second) }];
}

const MEASURES = {
  embedding: async (before, after, post, model) => {
    const { embeddings: [a, b, c, d] } = await post("encode", { inputs: [before.a, before.b, after.a, after.b] });
    const { name, compare } = SIMILARITIES[model.similarity];
    return [{ name: name === "cosine" ? "cosine similarity" : name, before: compare(a, b), after: compare(c, d) }];
  },
  reranker: (before, after, post) => scores(before, after, post, "score (logit)", { raw_scores: true }),
  multi: (before, after, post) => scores(before, after, post, "MaxSim", {}),
  classifier: async (before, after, post) => {
    const { labels: [first, second] } = await post("classify", { inputs: [before, after].map(({ a, b }) => (b ? [a, b] : a)) });
    const later = Object.fromEntries(second.map(({ label, score }) => [label, score]));
    return [
      { name: "predicted label", before: first[0].label, after: second[0].label },
      ...first.slice(0, 5).map(({ label, score }) => ({ name: `probability of ${label}`, before: score, after: later[label] })),
    ];
  },
  // Vectors of the served model have ids of entries, not their spellings: the reference model computes the weight.
  sparse: async (before, after, post, model) => {
    const values = await Promise.all([before, after].map(async (inputs) => (await post("debug/attribute", {
      text: inputs.a, ...secondText(inputs, model), target: TARGETS.sparse(inputs), method: "grad_x_input",
    })).value));
    return [{ name: `weight of ${before.token}`, before: values[0], after: values[1] }];
  },
};
