// Comparison of the served graph with the reference model, first causes first.

import { chart, logAxis } from "./charts.js";
import { colour } from "./colours.js";
import { count, element, facts, lamp, mark, sentenceCase, sentences, shown } from "./dom.js";
import { number, table } from "./tables.js";

// What differs in each comparison, in the order of cause and effect, out of how many.
const COMPARISONS = [
  ["Files", "file", ({ files }) => files, ({ actual, expected }) => actual !== expected],
  ["Tokenizer", "text", ({ tokenizer }) => tokenizer, ({ position }) => position !== null],
  ["Weights", "tensor", ({ weights }) => weights, ({ status }) => status !== "equal"],
  ["LayerNorm", "difficult row", (result) => result.layer_norm, ({ error, bound }) => !(error <= bound)],
];

export function drawParity([{ result }]) {
  const lamps = COMPARISONS.map(([name, noun, list, differs]) => {
    const all = list(result);
    const wrong = all.filter(differs).length;
    const unread = name === "Weights" && result.unreadable;
    return lamp(name, unread ? null : !wrong, unread ? "not compared" : wrong ? `${wrong} of ${count(all.length, noun)} ${wrong === 1 ? "differs" : "differ"}` : `${count(all.length, noun)} agree`);
  });
  const isOfVector = (failure) => failure.startsWith("the vector");
  const vectorsFail = result.failures.some(isOfVector);
  lamps.splice(3, 0,
    lamp("Layers", result.unreadable ? null : result.first_divergence === null, result.unreadable ? "not compared" : result.first_divergence === null ? `${count(result.curve.length, "layer")} agree` : `differ from ${result.first_divergence} on`),
    lamp("Vectors", !vectorsFail, `${count(result.vectors.length, "text")} ${vectorsFail ? "differ" : "agree"}`));
  // Vectors come from all that is before them.
  const ordered = [...result.failures.filter((failure) => !isOfVector(failure)), ...result.failures.filter(isOfVector)];
  const causes = ordered.map((failure) => sentenceCase(`${failure}.`));
  return [
    element("ul", { className: "lamps wide" }, ...lamps),
    result.passes
      ? sentences(["The served model agrees with the reference model."])
      : element("div", {}, element("h3", {}, "What differs, first causes first"), element("ol", { className: "causes" }, ...causes.map((cause) => element("li", {}, cause)))),
    ...differences(result),
    facts({
      "engine of the vectors": `${result.engine} in ${result.precision}`,
      "lowest cosine similarity": shown(Math.min(...result.vectors.map(({ cosine }) => cosine)), 9),
      "largest difference of an element": shown(Math.max(...result.vectors.map((vector) => vector.max_abs))),
    }),
    ...(result.curve.length ? [element("h3", {}, "Differences of the token vectors, by layer"), curveChart(result.curve)] : []),
    table("onnxruntime's norm on numerically difficult rows", ["Row", "Error", "Bound", "Verdict"], result.layer_norm.map(({ row, finite, error, bound }) =>
      [row, finite ? number(error) : "not finite", number(bound), mark(error <= bound)])),
  ];
}

const short = (hash) => (hash === null ? "removed" : `${hash.slice(0, 12)}…`);

// Files and weights that differ.
function differences({ files, weights }) {
  const changed = files.filter(({ actual, expected }) => actual !== expected);
  const wrong = weights.filter(({ status }) => status !== "equal");
  return [
    ...(changed.length ? [table("Files that changed since the start", ["File", "SHA-256 at the start", "SHA-256 now"],
      changed.map(({ name, expected, actual }) => [name, short(expected), short(actual)]))] : []),
    ...(wrong.length ? [table("Weights that differ", ["Weight", "Status", "Largest difference"],
      wrong.map(({ name, status, max_abs: difference }) => [name, status, difference === null ? "–" : number(difference)]))] : []),
  ];
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
      xaxis: { type: "category", tickangle: -45 },
      yaxis: logAxis(trace.y),
    }));
}
