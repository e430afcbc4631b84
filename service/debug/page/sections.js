// Path, request bodies and drawing function of each section of the page.

import { drawAttribution, drawPairs } from "./attribution.js";
import { drawFlow } from "./flow.js";
import { drawLayerNorm } from "./layer_norm.js";
import { drawParity } from "./parity.js";

const TARGETS = {
  cosine: (inputs) => ({ type: "cosine", text: inputs.b }),
  norm: () => ({ type: "norm" }),
  dim: (inputs) => ({ type: "dim", index: Number(inputs.dimension) }),
  score: (inputs) => ({ type: "score", versus: inputs.c || null }),
  label: (inputs) => ({ type: "label", label: inputs.label || null, versus: inputs.versus || null }),
  sparse: (inputs) => ({ type: "sparse", token: inputs.token }),
  maxsim: (inputs) => ({ type: "maxsim", versus: inputs.c || null }),
};

const QUERY = { a: "Where did the cat sit?", b: "The cat sat on the mat." };

// Initial values of the inputs, where they differ from those in index.html, by kind of model.
export const DEFAULTS = {
  embedding: {},
  reranker: { ...QUERY, target: "score" },
  classifier: { a: "What a wonderful day!", b: "", target: "label" },
  sparse: { target: "sparse" },
  // MaxSim has kinks, which take many evaluations at a small tolerance.
  multi: { ...QUERY, target: "maxsim", tolerance: "0.05", evaluations: "512" },
};

// A query always has a document, and the text of a classifier can have a second one.
const secondText = (inputs, { kind }) =>
  ["reranker", "multi"].includes(kind) || (kind === "classifier" && inputs.b) ? { text_pair: inputs.b } : {};

const ROWS = {
  text: (inputs) => ({ type: "text", text: inputs.a, norm: inputs.norm }),
  random: (inputs) => ({
    type: "random", distribution: inputs.distribution, shape: [Number(inputs.count), Number(inputs.width)],
  }),
};

const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);
// Numbers of a line may be separated by white space, commas, semicolons and square brackets.
const vectors = (text) => lines(text).map((line) => line.split(/[\s,;[\]]+/).filter(Boolean).map(Number));

const OBJECTIVES = {
  cosine: () => ({}),
  mnrl: () => ({}),
  dot: (inputs) => ({ vector: vectors(inputs.vectors)[0] ?? [] }),
  mse: (inputs) => ({ vectors: vectors(inputs.vectors) }),
  cotangent: (inputs) => ({ vectors: vectors(inputs.vectors) }),
};

export const SECTIONS = {
  attribute: {
    path: "attribute",
    button: "Attribute",
    nothing: "Choose at least one method.",
    hasCost: true,
    bodies: (inputs, model) => inputs.method.map((method) => ({
      text: inputs.a,
      ...secondText(inputs, model),
      target: TARGETS[inputs.target](inputs),
      method,
      layer: inputs.layer,
      baseline: inputs.baseline,
      tolerance: Number(inputs.tolerance),
      max_evaluations: Number(inputs.evaluations),
    })),
    draw: drawAttribution,
  },
  pair: {
    path: "attribute/pair",
    button: "Compare tokens",
    hasCost: true,
    bodies: (inputs) => [{
      a: inputs.a,
      b: inputs.b,
      layer: inputs["pair-layer"],
      baseline: inputs["pair-baseline"],
      tolerance: Number(inputs["pair-tolerance"]),
      max_evaluations: Number(inputs["pair-evaluations"]),
    }],
    draw: drawPairs,
  },
  flow: {
    path: "flow",
    button: "Measure the gradient flow",
    bodies: (inputs) => [{
      texts: [inputs.a, inputs.b, ...lines(inputs["more-texts"])],
      objective: { type: inputs.objective, ...OBJECTIVES[inputs.objective](inputs) },
      emulate: inputs.emulate || null,
      loss_scale: Number(inputs.scale),
    }],
    draw: drawFlow,
  },
  layernorm: {
    path: "layernorm",
    button: "Check add + norm",
    bodies: (inputs) => [{ source: ROWS[inputs.rows](inputs), dtype: inputs.dtype, dout: inputs.dout }],
    draw: drawLayerNorm,
  },
  parity: {
    path: "parity",
    button: "Compare",
    bodies: (inputs) => [{ texts: inputs["parity-texts"] === "texts" ? [inputs.a, inputs.b] : [] }],
    draw: drawParity,
  },
};
