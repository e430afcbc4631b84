// Scores of tokens and of token pairs, and their completeness.

import { chart, colour, divergingScale, label } from "./charts.js";
import { element, facts, mark, raw, rounded, shown, table } from "./dom.js";
import { byText, chips, largest, legend, spelling, unitsOf } from "./tokens.js";

const NAMES = {
  integrated_gradients: "Integrated gradients",
  grad_x_input: "Gradient × input",
  saliency: "Saliency",
  smoothgrad: "SmoothGrad",
  occlusion: "Occlusion",
};

// Names of the texts, by kind of model.
const DOCUMENTS = ["Query", "Document", "Versus"];
const TEXTS = { reranker: DOCUMENTS, multi: DOCUMENTS, classifier: ["First text", "Second text"] };

const SIGNS = "Positive scores speak for the document, negative ones for the document under Versus.";

const textsOf = (body) => [body.text, body.text_pair, body.target.versus];

export function drawAttribution(runs, inputs, { kind }) {
  const articles = runs.map(({ body, result }) => {
    const rows = byText(unitsOf(result, textsOf(body), inputs.units)).map(summed);
    const scale = largest(rows.flat().map(({ score }) => score));
    return element("article", { className: "method" },
      element("div", { className: "heading" }, element("h3", {}, NAMES[body.method]), legend(scale)),
      ...(rows.length === 3 && body.method !== "saliency" ? [element("p", { className: "muted" }, SIGNS)] : []),
      ...(rows.length === 1 ? [chips(rows[0], scale)] : rows.map((row, index) => passage(row, scale, TEXTS[kind][index]))),
      totals(result, body.target),
      ...(result.path ? [pathChart(result.path)] : []));
  });
  return [...articles, ...alignmentTables(runs[0])];
}

// A query that is read with each of two documents has the sum of its scores.
function summed(inputs) {
  return inputs[0].map((unit, index) => ({ ...unit, score: inputs.reduce((total, row) => total + row[index].score, 0) }));
}

function passage(row, scale, name) {
  const sum = row.filter(({ text }) => text !== null).reduce((total, { score }) => total + score, 0);
  return element("section", { className: "passage" },
    element("h4", {}, name, " ", element("span", { className: "sum" }, `sum ${shown(sum)}`)),
    chips(row, scale));
}

// One table for each document.
function alignmentTables({ body, result }) {
  if (!result.alignment) return [];
  const tokens = unitsOf(result, textsOf(body), "tokens");
  const tables = [1, 2].map((input) => result.alignment.filter(({ document }) => tokens[document].input === input));
  const drawn = tables.filter((pairs) => pairs.length).map((pairs, index) => {
    const sum = pairs.reduce((total, { value }) => total + value, 0);
    return table(`${DOCUMENTS[index + 1]}: MaxSim ${shown(sum)}`, ["Query token", "Most similar token", "Dot product"],
      pairs.map(({ query, document, value }) => [tokens[query].content, tokens[document].content, shown(value)]));
  });
  return [element("article", { className: "method" }, element("h3", {}, "Alignment"), element("div", { className: "side" }, ...drawn))];
}

const VALUES = {
  score: ({ versus }) => (versus === null ? "score (logit)" : "margin (difference of logits)"),
  maxsim: ({ versus }) => (versus === null ? "MaxSim" : "margin (difference of MaxSim)"),
  label: ({ versus }, { label }) => (versus === null ? `logit of ${label}` : `logit of ${label} − ${versus}`),
  sparse: ({ token }) => `weight of ${token}`,
};

function totals(result, target) {
  const complete = result.completeness;
  const name = VALUES[target.type]?.(target, result) ?? "value";
  return facts({
    "sum of scores": shown(result.sum),
    ...(result.value !== null && { [name]: shown(result.value) }),
    ...(result.baseline_value !== null && { "value at the baseline": shown(result.baseline_value) }),
    ...(complete && completeness(complete)),
  });
}

function completeness(complete) {
  return {
    "error of the sum / allowed": `${shown(complete.error)} / ${shown(complete.allowed)}`,
    "error of a score / allowed": `${shown(complete.score_error)} / ${shown(complete.score_allowed)}`,
    completeness: mark(complete.converged, ["converged", "not converged"]),
    evaluations: complete.evaluations,
  };
}

function pathChart(path) {
  const trace = {
    x: path.map(([part]) => part),
    y: path.map(([, value]) => value),
    mode: "markers",
    marker: { color: colour("accent"), size: 6 },
    hovertemplate: "position %{x:.3f}: %{y:.5f}<extra></extra>",
  };
  return element("figure", { className: "small" },
    element("figcaption", {}, "Target value at the evaluated points on the path from baseline to text."),
    chart("Target value at the evaluated points on the path from baseline to text", 150, [trace], {
      xaxis: { range: [-0.02, 1.02], tickvals: [0, 0.25, 0.5, 0.75, 1], ticktext: ["baseline", "¼", "½", "¾", "text"] },
      yaxis: { nticks: 4 },
    }));
}

export function drawPairs([{ body, result }]) {
  const [a, b] = [
    result.tokens_a.map((token) => spelling(token, body.a)),
    result.tokens_b.map((token) => spelling(token, body.b)),
  ];
  return [
    element("div", { className: "heading" },
      element("h3", {}, "Tokens of A (rows) and of B (columns)"), legend(largest(result.matrix.flat()))),
    matrixChart(result.matrix, a, b),
    equation(result),
    element("div", { className: "side" }, ...result.completeness.map((complete, index) =>
      element("div", {}, element("h4", {}, `Path integral of text ${"AB"[index]}`), facts(completeness(complete))))),
  ];
}

const MOST_LABELS = 40;
const MOST_NUMBERS = 14;

function matrixChart(matrix, a, b) {
  const scale = largest(matrix.flat()) || 1;
  const trace = {
    type: "heatmap",
    z: matrix,
    zmin: -scale,
    zmax: scale,
    colorscale: divergingScale(),
    showscale: false,
    xgap: 1,
    ygap: 1,
    hoverongaps: true,
    customdata: matrix.map((row, i) => row.map((value, j) => [label(a[i]), label(b[j]), raw(value)])),
    hovertemplate: "A: %{customdata[0]}<br>B: %{customdata[1]}<br>%{customdata[2]}<extra></extra>",
    ...(b.length <= MOST_NUMBERS && { text: matrix.map((row) => row.map((value) => rounded(value, scale))), texttemplate: "%{text}" }),
  };
  const height = Math.min(900, 60 + Math.max(24 * a.length, 120));
  return chart("Contribution of each pair of tokens to the cosine similarity", height, [trace], {
    xaxis: { ...ticks(b), side: "top", showgrid: false, zeroline: false },
    yaxis: { ...ticks(a), autorange: "reversed", showgrid: false, zeroline: false },
  });
}

function ticks(words) {
  const every = Math.ceil(words.length / MOST_LABELS);
  const positions = words.map((_, index) => index).filter((index) => index % every === 0);
  const short = (word) => (word.length > 18 ? `${word.slice(0, 17)}…` : word);
  return { tickvals: positions, ticktext: positions.map((index) => label(short(words[index]))), ticks: "" };
}

function equation({ sum, cosine, delta, reference_terms: terms }) {
  const term = (value, name) =>
    element("span", { className: "term" }, element("strong", { title: raw(value) }, shown(value)), element("small", {}, name));
  return element("div", { className: "equation", role: "math" },
    term(sum, "sum of pairs"), "+", term(terms.a_baseline, "A × baseline of B"), "+",
    term(terms.baseline_b, "baseline of A × B"), "−", term(terms.baselines, "baseline of A × baseline of B"),
    "=", term(cosine, "cosine"),
    element("span", { className: "muted" }, `numerical error ${shown(delta)}`));
}
