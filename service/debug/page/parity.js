// Comparison of the served graph with the reference model.

import { chart, colour } from "./charts.js";
import { element, facts, lamp, mark, shown, table } from "./dom.js";

// Name, check and size of each part.
const LAMPS = [
  ["Files", ({ files }) => files.every(({ actual, expected }) => actual === expected), ({ files }) => `${files.length} hashes`],
  ["Tokenizer", ({ tokenizer }) => tokenizer.every(({ position }) => position === null), ({ tokenizer }) => `${tokenizer.length} texts`],
  ["Vectors", ({ failures }) => !failures.some((failure) => failure.startsWith("the vector")), ({ vectors }) => `${vectors.length} texts`],
  ["Weights", ({ unreadable, weights }) => !unreadable && weights.every(({ max_abs: difference }) => difference === 0), ({ weights }) => `${weights.length} tensors`],
  ["Tokens", ({ unreadable, first_divergence }) => !unreadable && first_divergence === null, ({ curve }) => `${curve.length} layers`],
  ["LayerNorm", (result) => result.layer_norm.every(({ error, bound }) => error <= bound), (result) => `${result.layer_norm.length} hard rows`],
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
    element("h3", {}, "Tokens on their way through the model"),
    curveChart(result.curve),
    stressTable(result.layer_norm),
  ];
}

function worst({ engine, precision, vectors }) {
  return {
    "served by": `${engine} in ${precision}`,
    "worst cosine": shown(Math.min(...vectors.map(({ cosine }) => cosine)), 9),
    "largest difference of vectors": shown(Math.max(...vectors.map((vector) => vector.max_abs))),
  };
}

function curveChart(curve) {
  const trace = {
    x: curve.map(({ layer }) => layer),
    y: curve.map(({ relative }) => relative || null),
    mode: "lines+markers",
    line: { color: colour("accent"), width: 2 },
    marker: { size: 7 },
    hovertemplate: "%{x}: %{y:.2e} of the largest number<extra></extra>",
  };
  return element("figure", {},
    element("figcaption", {}, "Largest difference, as a part of the largest number at that layer."),
    chart("Largest relative difference by layer", 240, [trace], {
      xaxis: { type: "category" },
      yaxis: { type: "log", exponentformat: "power", nticks: 6 },
    }));
}

function stressTable(rows) {
  return table("The served LayerNorm on hard rows", ["row", "error", "bound", ""], rows.map(({ row, finite, error, bound }) =>
    [row, finite ? shown(error) : "not finite", shown(bound), mark(error <= bound)]));
}
