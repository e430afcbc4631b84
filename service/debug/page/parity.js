// Comparison of the served graph with the reference model.

import { chart, colour } from "./charts.js";
import { element, facts, lamp, mark, shown, table } from "./dom.js";

// Name, check and size of each comparison.
const LAMPS = [
  ["Files", ({ files }) => files.every(({ actual, expected }) => actual === expected), ({ files }) => `${files.length} hashes`],
  ["Tokenizer", ({ tokenizer }) => tokenizer.every(({ position }) => position === null), ({ tokenizer }) => `${tokenizer.length} texts`],
  ["Vectors", ({ failures }) => !failures.some((failure) => failure.startsWith("the vector")), ({ vectors }) => `${vectors.length} texts`],
  ["Weights", ({ unreadable, weights }) => !unreadable && weights.every(({ max_abs: difference }) => difference === 0), ({ weights }) => `${weights.length} tensors`],
  ["Tokens", ({ unreadable, first_divergence }) => !unreadable && first_divergence === null, ({ curve }) => `${curve.length} layers`],
  ["LayerNorm", (result) => result.layer_norm.every(({ error, bound }) => error <= bound), (result) => `${result.layer_norm.length} difficult rows`],
];

export function drawParity([{ result }]) {
  const lamps = LAMPS.map(([name, passes, count]) => {
    const good = passes(result);
    return lamp(name, good, `${count(result)} ${good ? "agree" : "differ"}`);
  });
  const failures = result.passes
    ? ["The served model agrees with the reference model."]
    : result.failures.map((failure) => `${failure[0].toUpperCase()}${failure.slice(1)}.`);
  return [
    element("ul", { className: "lamps wide" }, ...lamps),
    element("ul", { className: "sentences" }, ...failures.map((failure) => element("li", {}, failure))),
    facts(worst(result)),
    element("h3", {}, "Differences of the token vectors, by layer"),
    curveChart(result.curve),
    stressTable(result.layer_norm),
  ];
}

function worst({ engine, precision, vectors }) {
  return {
    "engine of the vectors": `${engine} in ${precision}`,
    "lowest cosine similarity": shown(Math.min(...vectors.map(({ cosine }) => cosine)), 9),
    "largest difference of an element": shown(Math.max(...vectors.map((vector) => vector.max_abs))),
  };
}

function curveChart(curve) {
  const trace = {
    x: curve.map(({ layer }) => layer),
    y: curve.map(({ relative }) => relative || null),
    mode: "lines+markers",
    line: { color: colour("accent"), width: 2 },
    marker: { size: 7 },
    hovertemplate: "%{x}: relative difference %{y:.2e}<extra></extra>",
  };
  return element("figure", {},
    element("figcaption", {}, "Largest difference after each layer, relative to the largest magnitude there."),
    chart("Largest relative difference by layer", 240, [trace], {
      xaxis: { type: "category" },
      yaxis: { type: "log", exponentformat: "power", nticks: 6 },
    }));
}

function stressTable(rows) {
  return table("onnxruntime's norm on numerically difficult rows", ["row", "error", "bound", ""], rows.map(({ row, finite, error, bound }) =>
    [row, finite ? shown(error) : "not finite", shown(bound), mark(error <= bound)]));
}
