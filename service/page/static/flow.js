// Sizes of values and gradients at each step of a training pass.

import { chart, logAxis, mark as markChart } from "./charts.js";
import { colour } from "./colours.js";
import { details, element, embedded, facts, percent, sentences, shown } from "./dom.js";
import { number, table } from "./tables.js";

const SERIES = [
  { name: "values, rms", colour: "accent", symbol: "circle", axis: "y", size: (step) => step.forward.rms },
  { name: "gradient, l2", colour: "high", symbol: "square", axis: "y2", size: (step) => step.gradient?.l2 ?? null },
  { name: "gradient of weights, l2", colour: "third", symbol: "diamond", axis: "y2", points: true, size: (step) => step.parameters?.l2 ?? null },
];

export function drawFlow([{ result }]) {
  const drawing = flowChart(result);
  return [
    facts({ objective: shown(result.objective), steps: result.steps.length, "non-finite steps": new Set(result.nonfinite_steps.map(({ step }) => step)).size }),
    sentences(verdicts(result)),
    drawing,
    inspector(result.steps, drawing),
    details("Table of all steps", numbers(result.steps)),
  ];
}

function verdicts({ first_nonfinite: first, verdicts: found, tokens }) {
  const where = () => {
    if (first.row == null) return "";
    const token = first.token == null ? "" : `, token ${first.token}: “${embedded(tokens[first.row][first.token].token)}”`;
    return ` (text ${first.row + 1}${token})`;
  };
  return [
    first
      ? `The first non-finite number appears in the ${first.phase} pass at ${first.step}${where()}.`
      : "All numbers are finite in the forward and the backward pass.",
    ...(found.length || first ? found.map(verdictSentence) : ["No gradient is vanishing, exploding or missing."]),
  ];
}

function verdictSentence({ step, kind, ratio, threshold }) {
  if (kind === "missing_gradient") return `The output or a parameter of ${step} receives no gradient.`;
  return `The gradient is ${kind} at ${step}: its norm is ${shown(ratio)} times the norm at the last layer; the threshold is ${shown(threshold)}.`;
}

// Values and gradients have an axis each, because their sizes cannot be compared.
function flowChart(result) {
  const names = result.steps.map(({ name }) => name);
  const traces = SERIES.map((series) => ({
    name: series.name,
    x: names.map((_, index) => index),
    // Zero and NaN become gaps, because a log scale cannot show them. The table has both.
    y: result.steps.map((step) => series.size(step) || null),
    yaxis: series.axis,
    customdata: names,
    mode: series.points ? "markers" : "lines+markers",
    line: { color: colour(series.colour), width: 2 },
    marker: { color: colour(series.colour), size: 6, symbol: series.symbol },
    hovertemplate: `%{customdata}<br>${series.name}: %{y:.3e}<extra></extra>`,
  }));
  const starts = spaced(names.map((_, index) => index).filter((index) => part(names[index]) !== part(names[index - 1])), names.length);
  const axis = (key) => ({
    ...logAxis(SERIES.filter(({ axis: own }) => own === key).flatMap(({ size }) => result.steps.map(size))), gridcolor: colour("line"),
  });
  return chart("Size of values and gradients at every step, on log scales", 420, traces, {
    shapes: result.nonfinite_steps.map((broken) => band(names.indexOf(broken.step), broken.role)),
    margin: { l: 72, r: 8, t: 8, b: 8 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hovermode: "closest",
    xaxis: { tickvals: starts, ticktext: starts.map((index) => part(names[index])), tickangle: -45, zeroline: false, range: [-0.7, names.length - 0.3], anchor: "y2" },
    yaxis: { ...axis("y"), domain: [0.54, 1], title: { text: "values" } },
    yaxis2: { ...axis("y2"), domain: [0, 0.46], title: { text: "gradients" } },
  });
}

// Labels that have room beside each other.
function spaced(positions, count) {
  const gap = (18 * count) / (Math.min(innerWidth, 1240) - 150);
  return positions.reduce((kept, position) => (kept.length && position - kept.at(-1) < gap ? kept : [...kept, position]), []);
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

// A slider over the steps, for the exact numbers of each without a mouse.
function inspector(steps, drawing) {
  const slider = element("input", { type: "range", min: 0, max: steps.length - 1, value: 0, step: 1 });
  const figures = element("div", { aria: { live: "polite" } });
  const show = () => {
    const step = steps[slider.value];
    slider.setAttribute("aria-valuetext", step.name);
    figures.replaceChildren(element("h3", {}, step.name), facts({
      "values, rms": shown(step.forward.rms),
      "values, largest": shown(step.forward.absmax),
      "not finite": bad(step.forward),
      "gradient, l2": optional(step.gradient, "l2"),
      "gradient, largest": optional(step.gradient, "absmax"),
      "gradient not finite": step.gradient ? bad(step.gradient) : "–",
      "gradient of weights, l2": optional(step.parameters, "l2"),
      "relative to weights": optional(step.parameters, "ratio_to_weights"),
    }));
    markChart(drawing, Number(slider.value));
  };
  slider.addEventListener("input", show);
  show();
  return element("div", { className: "inspector" }, element("label", { className: "field" }, element("span", { className: "name" }, "Step"), slider), figures);
}

const optional = (sizes, name) => (sizes ? shown(sizes[name]) : "–");
const bad = ({ nan, inf }) => [nan && `${nan} NaN`, inf && `${inf} ∞`].filter(Boolean).join(", ") || "–";

function numbers(steps) {
  const size = (sizes, name) => (sizes ? number(sizes[name]) : "–");
  return table("Sizes by step", ["Step", "Values rms", "Not finite", "Gradient l2", "Gradient not finite", "Underflow", "Gradient of weights l2", "Relative to weights"],
    steps.map(({ name, forward, gradient, parameters }) => [
      name, number(forward.rms), bad(forward),
      size(gradient, "l2"), gradient ? bad(gradient) : "–", gradient ? number(gradient.underflow_fraction, percent(gradient.underflow_fraction)) : "–",
      size(parameters, "l2"), size(parameters, "ratio_to_weights"),
    ]));
}
