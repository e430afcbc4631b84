// Sizes of values and gradients at each step of a training pass.

import { chart, colour } from "./charts.js";
import { element, facts, percent, shown, table } from "./dom.js";

const SERIES = [
  { name: "forward, rms", colour: "accent", symbol: "circle", size: (step) => step.forward.rms },
  { name: "gradient, l2", colour: "high", symbol: "square", size: (step) => step.gradient?.l2 ?? null },
  { name: "gradient of weights, l2", colour: "third", symbol: "diamond", points: true, size: (step) => step.parameters?.l2 ?? null },
];

export function drawFlow([{ result }]) {
  return [
    facts({ objective: shown(result.objective), steps: result.steps.length, "non-finite steps": brokenNames(result).size }),
    element("ul", { className: "sentences" }, ...sentences(result).map((sentence) => element("li", {}, sentence))),
    flowChart(result),
    element("details", {}, element("summary", {}, "Table of all steps"), numbers(result.steps)),
  ];
}

function sentences({ first_nonfinite: first, verdicts }) {
  const token = first?.token == null ? "" : `, token ${first.token}`;
  const row = first?.row == null ? "" : ` (text ${first.row + 1}${token})`;
  return [
    first
      ? `The first non-finite number appears in the ${first.phase} pass at ${first.step}${row}.`
      : "All numbers are finite in the forward and the backward pass.",
    ...(verdicts.length || first ? verdicts.map(verdictSentence) : ["No gradient is vanishing, exploding or missing."]),
  ];
}

function verdictSentence({ step, kind, ratio, threshold }) {
  if (kind === "missing_gradient") return `The output or a parameter of ${step} receives no gradient.`;
  return `The gradient is ${kind} at ${step}: its norm is ${shown(ratio)} times the norm at the last layer; the threshold is ${shown(threshold)}.`;
}

function brokenNames(result) {
  return new Set(result.nonfinite_steps.map(({ step }) => step));
}

function flowChart(result) {
  const names = result.steps.map(({ name }) => name);
  const traces = SERIES.map((series) => ({
    name: series.name,
    x: names.map((_, index) => index),
    // Zero and NaN become gaps, because a log scale cannot show them. The table has both.
    y: result.steps.map((step) => series.size(step) || null),
    customdata: names,
    mode: series.points ? "markers" : "lines+markers",
    line: { color: colour(series.colour), width: 2 },
    marker: { color: colour(series.colour), size: 6, symbol: series.symbol },
    hovertemplate: `%{customdata}<br>${series.name}: %{y:.3e}<extra></extra>`,
  }));
  const starts = names.map((_, index) => index).filter((index) => part(names[index]) !== part(names[index - 1]));
  return chart("Size of values and gradients at every step, on a log scale", 380, traces, {
    shapes: result.nonfinite_steps.map((broken) => band(names.indexOf(broken.step), broken.role)),
    margin: { l: 72, r: 8, t: 8, b: 8 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hovermode: "closest",
    xaxis: { tickvals: starts, ticktext: starts.map((index) => part(names[index])), tickangle: -35, zeroline: false, range: [-0.7, names.length - 0.3] },
    yaxis: { type: "log", exponentformat: "power", dtick: 1 },
  });
}

function part(name) {
  return name?.match(/^layers\.\d+/)?.[0] ?? name?.split(".")[0];
}

// Mark a step with non-finite numbers: producers are darker than propagators.
function band(index, role) {
  return {
    type: "rect", layer: "below", yref: "paper", y0: 0, y1: 1, x0: index - 0.5, x1: index + 0.5,
    fillcolor: colour("bad"), opacity: role === "producer" ? 0.75 : 0.13, line: { width: 0 },
  };
}

function numbers(steps) {
  const optional = (part, name) => (part ? shown(part[name]) : "–");
  const bad = ({ nan, inf }) => [nan && `${nan} NaN`, inf && `${inf} ∞`].filter(Boolean).join(", ") || "–";
  return table("Sizes by step", ["step", "forward rms", "not finite", "gradient l2", "not finite", "underflow", "gradient of weights l2", "relative to weights"],
    steps.map(({ name, forward, gradient, parameters }) => [
      name, shown(forward.rms), bad(forward),
      optional(gradient, "l2"), gradient ? bad(gradient) : "–", gradient ? percent(gradient.underflow_fraction) : "–",
      optional(parameters, "l2"), optional(parameters, "ratio_to_weights"),
    ]));
}
