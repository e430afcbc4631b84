// The sizes of values and gradients from step to step of a training pass.

import { chart, colour } from "./charts.js";
import { element, facts, percent, shown, table } from "./dom.js";

const SERIES = [
  { name: "forward, rms", colour: "accent", symbol: "circle", size: (place) => place.forward.rms },
  { name: "gradient, l2", colour: "high", symbol: "square", size: (place) => place.gradient?.l2 ?? null },
  { name: "gradient of weights, l2", colour: "third", symbol: "diamond", points: true, size: (place) => place.parameters?.l2 ?? null },
];

export function drawFlow([{ answer }]) {
  return [
    facts({ objective: shown(answer.objective), steps: answer.places.length, "broken steps": brokenNames(answer).size }),
    element("ul", { className: "sentences" }, ...sentences(answer).map((sentence) => element("li", {}, sentence))),
    flowChart(answer),
    element("details", {}, element("summary", {}, "Every step in numbers"), numbers(answer.places)),
  ];
}

function sentences({ first_nonfinite: first, verdicts }) {
  const token = first?.token == null ? "" : `, token ${first.token}`;
  const row = first?.row == null ? "" : ` (text ${first.row + 1}${token})`;
  return [
    first
      ? `The first number that is not finite comes up in the ${first.phase} pass at ${first.place}${row}.`
      : "Every number is finite, forward and backward.",
    ...(verdicts.length || first ? verdicts.map(verdictSentence) : ["No gradient vanishes, explodes or is missing."]),
  ];
}

function verdictSentence({ place, kind, ratio, threshold }) {
  if (kind === "missing_gradient") return `${place} gets no gradient.`;
  return `The gradient is ${kind} at ${place}: ${shown(ratio)} of the last layer's, beyond ${shown(threshold)}.`;
}

function brokenNames(answer) {
  return new Set(answer.nonfinite_places.map(({ place }) => place));
}

function flowChart(answer) {
  const names = answer.places.map(({ name }) => name);
  const traces = SERIES.map((series) => ({
    name: series.name,
    x: names.map((_, place) => place),
    // A logarithm has no place for zero, and NaN is drawn as a gap: the table has both.
    y: answer.places.map((place) => series.size(place) || null),
    customdata: names,
    mode: series.points ? "markers" : "lines+markers",
    line: { color: colour(series.colour), width: 2 },
    marker: { color: colour(series.colour), size: 6, symbol: series.symbol },
    hovertemplate: `%{customdata}<br>${series.name}: %{y:.3e}<extra></extra>`,
  }));
  const starts = names.map((_, place) => place).filter((place) => part(names[place]) !== part(names[place - 1]));
  return chart("Size of values and gradients at every step, on a log scale", 380, traces, {
    shapes: answer.nonfinite_places.map((broken) => band(names.indexOf(broken.place), broken.role)),
    margin: { l: 72, r: 8, t: 8, b: 8 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hovermode: "closest",
    xaxis: { tickvals: starts, ticktext: starts.map((place) => part(names[place])), tickangle: -35, zeroline: false, range: [-0.7, names.length - 0.3] },
    yaxis: { type: "log", exponentformat: "power", dtick: 1 },
  });
}

function part(name) {
  return name?.match(/^layers\.\d+/)?.[0] ?? name?.split(".")[0];
}

// What makes a number that is not finite stands out from what hands it on.
function band(place, role) {
  return {
    type: "rect", layer: "below", yref: "paper", y0: 0, y1: 1, x0: place - 0.5, x1: place + 0.5,
    fillcolor: colour("bad"), opacity: role === "producer" ? 0.75 : 0.13, line: { width: 0 },
  };
}

function numbers(places) {
  const optional = (part, name) => (part ? shown(part[name]) : "–");
  const bad = ({ nan, inf }) => [nan && `${nan} NaN`, inf && `${inf} ∞`].filter(Boolean).join(", ") || "–";
  return table("Sizes by step", ["step", "forward rms", "not finite", "gradient l2", "not finite", "underflow", "weights' gradient l2", "to weights"],
    places.map(({ name, forward, gradient, parameters }) => [
      name, shown(forward.rms), bad(forward),
      optional(gradient, "l2"), gradient ? bad(gradient) : "–", gradient ? percent(gradient.underflow_fraction) : "–",
      optional(parameters, "l2"), optional(parameters, "ratio_to_weights"),
    ]));
}
