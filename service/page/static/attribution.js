// Scores of words and tokens, their completeness and their faithfulness.

import { chart } from "./charts.js";
import { colour } from "./colours.js";
import { textNames } from "./deletion.js";
import { element, embedded, facts, mark, muted, shown } from "./dom.js";
import { faithfulness } from "./faithfulness.js";
import { sum } from "./numbers.js";
import { number, table } from "./tables.js";
import { byText, largest, legend, scored, total, unitsOf } from "./tokens.js";

const NAMES = {
  integrated_gradients: "Integrated gradients",
  grad_x_input: "Gradient × input",
  saliency: "Saliency",
  smoothgrad: "SmoothGrad",
  occlusion: "Occlusion",
};
const MEANINGS = {
  integrated_gradients: "Effect of each word on the way from the baseline to this text; baseline and scores add up to the result.",
  grad_x_input: "Slope at this text times the token vector; exact only for linear models.",
  saliency: "Length of the slope at this text: how sensitive the number is to a word. Without a sign.",
  smoothgrad: "Slope times the token vector, as the mean over noisy copies of the text.",
  occlusion: "Change of the number if a word is replaced by the baseline.",
};

const SIGNS = "Positive scores speak for the document, negative ones for the other document.";

const textsOf = (body) => [body.text, body.text_pair, body.target.versus];

// Rows of units with scores, one for each text.
function rowsOf({ body, result }, kind) {
  return byText(unitsOf(result.tokens, result.words, textsOf(body), kind)).map((inputs) =>
    // A query that is read with each of two documents has the sum of its scores.
    inputs[0].map((unit, index) => ({ ...unit, score: sum(inputs.map((own) => total(own[index], result.scores))) })));
}

// The chips of every text with tokens; `names` are the names of all texts.
function passages(rows, scale, names) {
  return rows.flatMap((row, index) => {
    const whole = sum(row.filter(({ text }) => text !== null).map(({ score }) => score));
    const name = names[index] ?? "Text";
    return element("section", { className: "passage" },
      element("h4", {}, name, " ", element("span", { className: "sum" }, `sum ${shown(whole)}`)),
      scored(row, row.map(({ score }) => score), scale, `Scores of ${name}`));
  });
}

export function drawAttribution(runs, inputs, { kind }) {
  const articles = runs.map((run) => {
    const rows = rowsOf(run, inputs.units);
    const scale = largest(rows.flat().map(({ score }) => score));
    const isSigned = run.body.method !== "saliency";
    return element("article", { className: "method" },
      element("div", { className: "heading" }, element("h3", {}, NAMES[run.body.method]), legend(scale, { isSigned })),
      muted(MEANINGS[run.body.method]),
      ...(rows.length === 3 && isSigned ? [muted(SIGNS)] : []),
      ...passages(rows, scale, textNames(kind, rows.length > 1)),
      totals(run.result, run.body.target),
      ...faithfulness(run.result),
      ranking(rows, rows.length > 1 ? textNames(kind, true) : null),
      ...(run.result.path ? [pathChart(run.result.path)] : []));
  });
  return [...articles, ...alignmentTables(runs[0])];
}

const MOST = 12;

// The units by size of their scores.
function ranking(rows, names) {
  const units = rows.flatMap((row, index) => row.map((unit) => ({ ...unit, name: names?.[index] })));
  const best = units.sort((left, right) => Math.abs(right.score) - Math.abs(left.score)).slice(0, MOST);
  return table(`Top ${best.length} of ${units.length} by size of the score`, ["Word or token", ...(names ? ["Text"] : []), "Score"],
    best.map(({ content, name, score }) => [content, ...(names ? [name] : []), number(score)]));
}

// One table for each document.
export function alignmentTables({ body, result }) {
  if (!result.alignment) return [];
  const tokens = unitsOf(result.tokens, result.words, textsOf(body), "tokens");
  const tables = [1, 2].map((input) => result.alignment.filter(({ document }) => tokens[document].input === input));
  const drawn = tables.filter((pairs) => pairs.length).map((pairs, index) =>
    table(`${textNames("multi")[index + 1]}: MaxSim ${shown(sum(pairs.map(({ value }) => value)))}`, ["Query token", "Most similar token", "Dot product"],
      pairs.map(({ query, document, value }) => [tokens[query].content, tokens[document].content, number(value)])));
  return [element("article", { className: "method" }, element("h3", {}, "Alignment"), element("div", { className: "columns" }, ...drawn))];
}

const VALUES = {
  score: ({ versus }) => (versus === null ? "score (logit)" : "margin (difference of logits)"),
  maxsim: ({ versus }) => (versus === null ? "MaxSim" : "margin (difference of MaxSim)"),
  label: ({ versus }, { label }) => (versus === null ? `logit of ${embedded(label)}` : `logit of ${embedded(label)} − ${embedded(versus)}`),
  sparse: ({ token }) => `weight of ${embedded(token)}`,
  cosine: () => "cosine",
  similarity: () => "similarity",
  margin: () => "margin (difference of similarities)",
};

const valueName = (target, result) => VALUES[target.type]?.(target, result) ?? "value";

export function totals(result, target) {
  const complete = result.completeness;
  return facts({
    "sum of scores": shown(result.sum),
    ...(result.value !== null && { [valueName(target, result)]: shown(result.value) }),
    ...(result.baseline_value !== null && { "value at the baseline": shown(result.baseline_value) }),
    ...(complete && completeness(complete)),
  });
}

export const completeness = (complete) => ({
  "error of the sum / allowed": `${shown(complete.error)} / ${shown(complete.allowed)}`,
  "error of a score / allowed": `${shown(complete.score_error)} / ${shown(complete.score_allowed)}`,
  completeness: mark(complete.converged, ["converged", "not converged"]),
  evaluations: complete.evaluations,
});

function pathChart(path) {
  const trace = {
    x: path.map(([part]) => part),
    y: path.map(([, value]) => value),
    mode: "markers",
    marker: { color: colour("accent"), size: 6 },
    hovertemplate: "position %{x:.3f}: %{y:.5f}<extra></extra>",
  };
  return element("figure", { className: "small" },
    element("figcaption", {}, "Target value at the evaluated points on the path from baseline to text. Nothing is drawn between them."),
    chart("Target value at the evaluated points on the path from baseline to text", 150, [trace], {
      xaxis: { range: [-0.02, 1.02], tickvals: [0, 0.5, 1], ticktext: ["baseline", "½", "text"] },
      yaxis: { nticks: 4 },
    }));
}
