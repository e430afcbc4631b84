// Requests and drawing function of each section of the page.

import { drawAttribution } from "./attribution.js";
import { drawComparison } from "./compare.js";
import { drawEvaluation, evaluationRequests } from "./evaluation.js";
import { drawExplanation } from "./explain.js";
import { drawFlow } from "./flow.js";
import { drawLayerNorm } from "./layer_norm.js";
import { drawParity } from "./parity.js";
import { drawRanking, drawRankingSecond, rankRequests, rankSecondRequests } from "./rank.js";
import { compareRequests, explainRequests, parsedRows, secondText, TARGETS } from "./questions.js";
import { drawSecond, secondChecks, secondRequests } from "./second.js";
import { drawGradient } from "./vjp.js";
import { lines, vectors } from "./inputs.js";

const TEXT_FIELDS = {
  "/text": "a", "/text_pair": "b", "/target/text": "b", "/target/positive": "b", "/target/negative": "c",
  "/target/vector": "vector", "/target/index": "dimension", "/target/label": "label", "/target/token": "token",
};

// The field at fault by JSON pointer; a pointer below one of these is about the same field.
const ATTRIBUTE_FIELDS = (kind) => ({
  ...TEXT_FIELDS, "/target/versus": kind === "classifier" ? "versus" : "c", "/layer": "layer", "/baseline": "baseline",
  "/tolerance": "tolerance", "/max_evaluations": "evaluations", "/samples": "samples", "/sigma": "sigma", "/seed": "seed",
});

const ROWS = {
  text: (inputs) => ({ type: "text", text: inputs.a, norm: inputs.norm }),
  random: (inputs) => ({ type: "random", distribution: inputs.distribution, shape: [Number(inputs.count), Number(inputs.width)] }),
  own: (inputs) => ({ ...parsedRows(inputs.own), type: "rows" }),
};

const OBJECTIVES = {
  cosine: () => ({}),
  mnrl: () => ({}),
  dot: (inputs) => ({ vector: vectors(inputs.vectors)[0] ?? [] }),
  mse: (inputs) => ({ vectors: vectors(inputs.vectors) }),
  cotangent: (inputs) => ({ vectors: vectors(inputs.vectors) }),
};

// `entry`: the part of the page; `kinds`: models that it is for, all if absent; `route`: the gradient
// route that it needs; `isCheap`: a URL with a result runs it again; `hasDryRun`: its requests can be
// checked before the run; `isOfTwo`: it compares two served models; `uses`: whether it uses all texts, text A or none; `second`: requests after
// the first answer, each with `more` if its result can need further ones, with their own drawing function and checks.
export const SECTIONS = {
  rank: {
    entry: "why", kinds: ["embedding", "reranker", "multi", "sparse"], button: "Rank", isCheap: true, uses: () => "none",
    requests: rankRequests, draw: drawRanking,
    second: rankSecondRequests, drawSecond: drawRankingSecond,
  },
  explain: {
    entry: "why", button: "Explain", isCheap: true,
    requests: explainRequests, draw: drawExplanation,
    second: secondRequests, drawSecond, checks: secondChecks,
  },
  attribute: {
    entry: "defect", route: "attribute", button: "Attribute", nothing: "Choose at least one method.", isCheap: true, hasDryRun: true,
    requests: (inputs, model) => inputs.method.map((method) => ({
      name: method.replaceAll("_", " "),
      path: "debug/attribute",
      fields: ATTRIBUTE_FIELDS(model.kind),
      body: {
        text: inputs.a,
        ...secondText(inputs, model),
        target: TARGETS[inputs.target](inputs),
        method,
        layer: inputs.layer,
        baseline: inputs.baseline,
        tolerance: Number(inputs.tolerance),
        max_evaluations: Number(inputs.evaluations),
        samples: Number(inputs.samples),
        sigma: Number(inputs.sigma),
        seed: Number(inputs.seed),
        faithfulness: "words",
      },
    })),
    draw: drawAttribution,
  },
  questions: {
    entry: "why", kinds: ["embedding", "reranker", "multi", "sparse"], button: "Run the questions", uses: () => "none",
    nothing: "Paste questions, or open a file.",
    requests: evaluationRequests,
    draw: drawEvaluation,
  },
  compare: {
    entry: "why", kinds: ["embedding"], isOfTwo: true, button: "Compare", uses: () => "none",
    nothing: "Choose another model.",
    requests: compareRequests,
    draw: drawComparison,
  },
  flow: {
    entry: "defect", route: "flow", button: "Measure the gradient flow", isCheap: true,
    requests: (inputs) => [{
      name: "one training step",
      path: "debug/flow",
      fields: {
        "/texts/0": "a", "/texts/1": "b", "/texts": "more-texts", "/objective/vector": "vectors", "/objective/vectors": "vectors",
        "/objective": "objective", "/emulate": "emulate", "/loss_scale": "scale",
      },
      body: {
        texts: [inputs.a, inputs.b, ...lines(inputs["more-texts"])],
        objective: { type: inputs.objective, ...OBJECTIVES[inputs.objective](inputs) },
        emulate: inputs.emulate || null,
        loss_scale: Number(inputs.scale),
      },
    }],
    draw: drawFlow,
  },
  layernorm: {
    entry: "defect", route: "layernorm", button: "Check add + norm", isCheap: true,
    uses: ({ rows }) => (rows === "text" ? "a" : "none"),
    requests: (inputs) => [{
      name: "all implementations",
      path: "debug/layernorm",
      fields: {
        "/source/text": "a", "/source/norm": "norm", "/source/shape/0": "count", "/source/shape/1": "width", "/source/shape": "count",
        "/source": inputs.rows === "own" ? "own" : "rows", "/row": "row", "/dtype": "dtype", "/dout": "dout",
      },
      body: {
        source: ROWS[inputs.rows](inputs), dtype: inputs.dtype, dout: inputs.dout,
        row: inputs.row === "" ? null : Number(inputs.row),
      },
    }],
    draw: drawLayerNorm,
  },
  parity: {
    entry: "defect", route: "parity", button: "Compare with the reference model",
    uses: (inputs) => (inputs["parity-texts"] === "texts" ? "all" : "none"),
    requests: (inputs) => [{
      name: "both models",
      path: "debug/parity",
      fields: { "/texts/0": "a", "/texts/1": "b" },
      body: { texts: inputs["parity-texts"] === "texts" ? [inputs.a, inputs.b] : [] },
    }],
    draw: drawParity,
  },
  vjp: {
    entry: "defect", route: "vjp", button: "Backpropagate", isCheap: true, uses: () => "a",
    requests: (inputs) => [{
      name: "one backward pass",
      path: "debug/vjp",
      fields: { "/text": "a", "/cotangent": "cotangent", "/layer": "vjp-layer", "/reduce": "reduce" },
      body: { text: inputs.a, cotangent: vectors(inputs.cotangent).flat(), layer: inputs["vjp-layer"], reduce: inputs.reduce },
    }],
    draw: drawGradient,
  },
};
