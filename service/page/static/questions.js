// Requests of the questions that several sections ask.

import { lines, vectors } from "./inputs.js";
import { Problem } from "./request.js";
import { UNRELATED } from "./reading.js";

export const TARGETS = {
  cosine: (inputs) => ({ type: "cosine", text: inputs.b }),
  similarity: (inputs) => ({ type: "similarity", text: inputs.b }),
  margin: (inputs) => ({ type: "margin", positive: inputs.b, negative: inputs.c }),
  dot: (inputs) => ({ type: "dot", vector: vectors(inputs.vector).flat() }),
  norm: () => ({ type: "norm" }),
  dim: (inputs) => ({ type: "dim", index: Number(inputs.dimension) }),
  score: (inputs) => ({ type: "score", versus: inputs.c || null }),
  label: (inputs) => ({ type: "label", label: inputs.label || null, versus: inputs.versus || null }),
  sparse: (inputs) => ({ type: "sparse", token: inputs.token }),
  maxsim: (inputs) => ({ type: "maxsim", versus: inputs.c || null }),
};

const QUERY = { a: "Where did the cat sit?", b: "The cat sat on the mat." };
// MaxSim has kinks, which take many evaluations at a small tolerance.
const KINKS = { tolerance: "0.05", evaluations: "512", "explain-tolerance": "0.05", "explain-evaluations": "512" };

// Initial values of the inputs, where they differ from those in index.html, by kind of model.
export const DEFAULTS = {
  embedding: {},
  reranker: QUERY,
  classifier: { a: "What a wonderful day!", b: "" },
  sparse: QUERY,
  multi: { ...QUERY, ...KINKS },
};

// A query always has a document, and the text of a classifier can have a second one.
export const secondText = (inputs, { kind }) =>
  ["reranker", "multi"].includes(kind) || (kind === "classifier" && inputs.b) ? { text_pair: inputs.b } : {};

export function parsedRows(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Problem(`not JSON: ${error.message}`, { field: "own" });
  }
}

// Words of longer texts cost too much, and say little each.
const MANY_WORDS = 60;

function unitsOf({ by, a, b, c }) {
  if (by !== "auto") return by;
  const segments = new Intl.Segmenter(undefined, { granularity: "word" }).segment(`${a} ${b} ${c}`);
  let words = 0;
  for (const { isWordLike } of segments) if (isWordLike && ++words > MANY_WORDS) return "auto";
  return "words";
}

// Raw scores of a reranker are logits, which are not squeezed at the ends as their sigmoid is.
export const scoreBody = (query, documents, { kind }) =>
  ({ queries: query, documents, ...(kind === "reranker" && { raw_scores: true }) });

export const classifyBody = ({ a, b }) => ({ inputs: [b ? [a, b] : a] });

// How similar a text is to unrelated ones and to itself; see `landmarks` in reading.js.
export const referenceRequest = (text, model) => ({
  key: "reference", name: "similarity to unrelated texts", path: "score", isOptional: true,
  body: scoreBody(text, [...UNRELATED, text], model),
});

// The explanation by deletion, from the serving process.
export function explainRequests(inputs, model) {
  const by = unitsOf(inputs);
  if (model.kind === "classifier") {
    return [{
      key: "deletion", name: "explanation", path: "classify", fields: { "/inputs": "a", "/explain/label": "label" },
      body: { ...classifyBody(inputs), explain: { by, label: inputs.label || null } },
    }];
  }
  const documents = inputs.c ? [inputs.b, inputs.c] : [inputs.b];
  const explained = {
    key: "deletion", name: "explanation", path: "score",
    fields: { "/queries": "a", "/documents/0": "b", "/documents/1": "c", "/documents": "b" },
    body: { ...scoreBody(inputs.a, documents, model), explain: { by, of: "both" } },
  };
  return model.kind === "embedding" ? [explained, referenceRequest(inputs.a, model)] : [explained];
}

// Vectors of the same texts from both models and, with gradient routes, their token vectors after each layer.
export function compareRequests(inputs, model) {
  const texts = lines(inputs["compare-texts"]);
  if (!inputs.other) return [];
  return [model.name, inputs.other].flatMap((name, index) => [
    {
      key: `vectors${index}`, name: `vectors of ${name}`, path: "encode", fields: { "/inputs": "compare-texts", "/model": "other" },
      body: { model: name, inputs: texts },
    },
    ...(model.gradients ? [{
      key: `activations${index}`, name: `layers of ${name}`, path: "debug/activations", isOptional: true,
      fields: { "/texts": "compare-texts", "/model": "other" },
      body: { model: name, texts, taps: model.gradients.layers, reduction: "mean", format: "safetensors" },
    }] : []),
  ]);
}
