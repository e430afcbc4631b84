// Requests of the questions that several sections ask.

import { lines, vectors } from "./inputs.js";
import { Problem } from "./request.js";
import { UNRELATED } from "./reading.js";

export const TARGETS = {
  cosine: (inputs) => ({ type: "cosine", text: inputs.b }),
  similarity: (inputs) => ({ type: "similarity", text: inputs.b }),
  margin: (inputs) => ({ type: "margin", positive: inputs.b, negative: inputs.negative }),
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

// Initial values of the inputs, where they differ from those in index.html, by kind of model. The initial target is
// the first of the model.
export const DEFAULTS = {
  embedding: {},
  reranker: QUERY,
  classifier: { a: "What a wonderful day!", b: "" },
  sparse: {},
  multi: { ...QUERY, ...KINKS },
};

// A query always has a document, and the text of a classifier can have a second one.
export const secondText = (inputs, { kind }) =>
  ["reranker", "multi"].includes(kind) || (kind === "classifier" && inputs.b) ? { text_pair: inputs.b } : {};

export function parsedRows(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Problem(`not JSON: ${error.message}`, null, "own");
  }
}

// The first request has the first picture; the others follow in order of their cost.
export function explainRequests(inputs, model) {
  return model.kind === "embedding" ? similarityRequests(inputs, model) : [...served(inputs, model), targetRequest(inputs, model)];
}

function similarityRequests(inputs, { similarity, routes }) {
  const options = { tolerance: Number(inputs["explain-tolerance"]), max_evaluations: Number(inputs["explain-evaluations"]) };
  const fields = { "/tolerance": "explain-tolerance", "/max_evaluations": "explain-evaluations" };
  const attribution = (key, text, other) => ({
    key,
    name: `integrated gradients of text ${key.toUpperCase()}`,
    path: "debug/attribute",
    fields: { ...fields, "/text": key, "/target/text": key === "a" ? "b" : "a" },
    body: { text, target: { type: similarity === "cosine" ? "cosine" : "similarity", text: other }, ...options, faithfulness: "words" },
  });
  const pair = {
    key: "pair",
    name: "pairs of words",
    path: "debug/attribute/pair",
    fields: { ...fields, "/a": "a", "/b": "b", "/layer": "pair-layer", "/baseline": "pair-baseline" },
    body: { a: inputs.a, b: inputs.b, layer: inputs["pair-layer"], baseline: inputs["pair-baseline"], ...options },
  };
  return [
    ...(routes.includes("attribute/pair") ? [pair] : []),
    {
      key: "reference",
      name: "unrelated texts",
      path: "encode",
      isOptional: true,
      body: { inputs: [inputs.a, inputs.b, ...UNRELATED] },
    },
    attribution("a", inputs.a, inputs.b),
    attribution("b", inputs.b, inputs.a),
  ];
}

// The result of the served model, where it has a route for it.
function served(inputs, { kind }) {
  const request = { key: "served", name: "served model", isOptional: true };
  if (kind === "classifier") return [{ ...request, path: "classify", body: { inputs: [inputs.b ? [inputs.a, inputs.b] : inputs.a] } }];
  if (kind === "sparse") return [];
  const documents = inputs.c ? [inputs.b, inputs.c] : [inputs.b];
  return [{ ...request, path: "score", body: { queries: inputs.a, documents, ...(kind === "reranker" && { raw_scores: true }) } }];
}

function targetRequest(inputs, model) {
  return {
    key: "target",
    name: "integrated gradients",
    path: "debug/attribute",
    fields: {
      "/text": "a", "/text_pair": "b", "/target/label": "label", "/target/versus": model.kind === "classifier" ? "versus" : "c",
      "/target/token": "token", "/tolerance": "explain-tolerance", "/max_evaluations": "explain-evaluations",
    },
    body: {
      text: inputs.a,
      ...secondText(inputs, model),
      target: TARGETS[model.targets[0]](inputs),
      tolerance: Number(inputs["explain-tolerance"]),
      max_evaluations: Number(inputs["explain-evaluations"]),
      faithfulness: "words",
    },
  };
}

// Vectors of the same texts from both models, and their token vectors after each layer.
export function compareRequests(inputs, model) {
  const texts = lines(inputs["compare-texts"]);
  if (!inputs.other) return [];
  return [model.model.name, inputs.other].flatMap((name, index) => [
    {
      key: `vectors${index}`, name: `vectors of ${name}`, path: "encode", fields: { "/inputs": "compare-texts", "/model": "other" },
      body: { model: name, inputs: texts },
    },
    {
      key: `activations${index}`, name: `layers of ${name}`, path: "debug/activations", isOptional: true,
      fields: { "/texts": "compare-texts", "/model": "other" },
      body: { model: name, texts, taps: model.layers, reduction: "mean", format: "safetensors" },
    },
  ]);
}
