// Circuit diagram of add + norm: the forward pass runs down the left, the backward pass up the right.

import { element, facts, mark, percent, raw, shown, table } from "./dom.js";
import { warmth } from "./tokens.js";

// Formula of each step, then the names of earlier steps that the step reads besides the preceding one.
const FORWARD = {
  x: ["x + residual"],
  mean: ["mean(x)"],
  xmu: ["x − mean", "x"],
  sq: ["xmu²"],
  var: ["mean(sq)"],
  var_eps: ["var + ε"],
  sqrtvar: ["√var_eps"],
  ivar: ["1 / sqrtvar"],
  xhat: ["xmu · ivar", "xmu"],
  gammax: ["γ · xhat"],
  out: ["gammax + β"],
};
const BACKWARD = {
  dbeta: ["Σ dout"],
  dgamma: ["Σ dout · xhat"],
  dxhat: ["dout · γ"],
  divar: ["Σ dxhat · xmu"],
  dxmu1: ["dxhat · ivar", "dxhat"],
  dsqrtvar: ["−divar / sqrtvar²", "divar"],
  dvar: ["dsqrtvar / 2 sqrtvar"],
  dsq: ["dvar / D"],
  dxmu2: ["2 xmu · dsq"],
  dxmu: ["dxmu1 + dxmu2", "dxmu1"],
  dmu: ["−Σ dxmu"],
  dx2: ["dmu / D"],
  dx: ["dxmu + dx2", "dxmu"],
};
// Steps that do not read the preceding step.
const STARTS = new Set(["x", "dbeta", "dgamma", "dxhat", "dxmu1", "dsqrtvar"]);

const VERDICTS = ["All implementations are correct on these rows.", "An implementation is wrong on these rows.", "These rows cannot decide whether the implementations are correct."];

const [PITCH, BOX, WIDTH, GAP] = [44, 34, 270, 96];
// Ends of the colour scale, as powers of ten: a float32 rounding error, and an error that affects the
// served vectors.
const [BEST, WORST] = [-8, -3];

export function drawLayerNorm([{ result }]) {
  const chosen = element("aside", { className: "chosen", aria: { live: "polite" } });
  const choose = (step) => chosen.replaceChildren(...statistics(step));
  choose(result.steps.find(({ name }) => name === "out") ?? result.steps[0]);
  return [
    element("p", { className: "verdict" }, mark(result.passes, VERDICTS)),
    element("div", { className: "bench" }, circuit(result.steps, choose), element("div", {}, scale(), chosen)),
    table("Invariants of the operator", ["invariant", "pass", "residual", "bound", ""], result.invariants.map((invariant) =>
      [invariant.name, invariant.phase, shown(invariant.residual), shown(invariant.bound), mark(invariant.passes)])),
    table("Implementations", ["implementation", "pass", "", "largest error, relative to its bound", "reason for no verdict"], result.verdicts.map((verdict) =>
      [verdict.implementation, verdict.phase, mark(verdict.passes), worst(verdict), verdict.no_verdict ?? ""])),
  ];
}

function circuit(steps, choose) {
  const byName = new Map(steps.map((step) => [step.name, step]));
  const columns = [
    { table: FORWARD, left: 44, side: -1, place: (index) => index + 1 },
    { table: BACKWARD, left: 44 + WIDTH + GAP, side: 1, place: (index, count) => count - 1 - index },
  ];
  const rows = Object.keys(BACKWARD).length;
  const [width, height] = [88 + 2 * WIDTH + GAP, rows * PITCH + 26];
  const wires = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  wires.append(arrowHead());
  const boxes = columns.flatMap((column) => {
    const names = Object.keys(column.table);
    const top = (name) => 26 + PITCH * column.place(names.indexOf(name), names.length);
    for (const name of names) wires.append(...wiresInto(name, names, top, column));
    return names.filter((name) => byName.has(name)).map((name) =>
      box(byName.get(name), column.table[name][0], column.left, top(name), choose));
  });
  const heads = columns.map(({ left }, place) =>
    element("h4", { style: { left: `${left}px` } }, place ? "backward, up" : "forward, down"));
  return element("div", { className: "scroll" },
    element("div", { className: "circuit", style: { width: `${width}px`, height: `${height}px` } }, wires, ...heads, ...boxes));
}

function wiresInto(name, names, top, { table: steps, left, side }) {
  const above = STARTS.has(name) ? [] : [names[names.indexOf(name) - 1]];
  const straight = above.map((from) => {
    const [start, end] = [top(from), top(name)];
    const [y1, y2] = start < end ? [start + BOX, end] : [start, end + BOX];
    return svg("path", { d: `M${left + WIDTH / 2} ${y1}V${y2}`, "marker-end": "url(#arrow)" });
  });
  const curved = steps[name].slice(1).map((from) => {
    const edge = side < 0 ? left : left + WIDTH;
    const [start, end] = [top(from) + BOX / 2, top(name) + BOX / 2];
    const reach = edge + side * Math.min(40, 12 + Math.abs(end - start) / 6);
    return svg("path", { d: `M${edge} ${start}C${reach} ${start} ${reach} ${end} ${edge} ${end}`, "marker-end": "url(#arrow)" });
  });
  return [...straight, ...curved];
}

function arrowHead() {
  const head = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto" });
  head.append(svg("path", { d: "M0 0L8 4L0 8z" }));
  return head;
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function box(step, formula, left, top, choose) {
  const error = step.error_float64;
  const finite = Number.isFinite(error);
  const weight = error === 0 ? 0 : Math.min(1, Math.max(0, (Math.log10(error) - BEST) / (WORST - BEST)));
  const made = element("button", {
    className: finite ? "step" : "step broken",
    style: { left: `${left}px`, top: `${top}px`, width: `${WIDTH}px`, height: `${BOX}px`, ...(finite && warmth(weight)) },
    data: { step: step.name },
  }, element("strong", {}, step.name), element("span", { className: "formula" }, formula), element("span", { className: "error" }, shown(error)));
  for (const event of ["click", "focus", "mouseenter"]) made.addEventListener(event, () => choose(step));
  return made;
}

function statistics(step) {
  const optional = (value) => (value === null ? "–" : shown(value));
  return [
    element("h3", {}, step.name),
    facts({
      pass: step.phase,
      shape: step.shape.join(" × "),
      minimum: shown(step.minimum),
      maximum: shown(step.maximum),
      mean: shown(step.mean),
      rms: shown(step.rms),
      "NaN / ∞": `${step.nan} / ${step.inf}`,
      ...(step.first_nonfinite && { "first non-finite index": `[${step.first_nonfinite.join(", ")}]` }),
      "error against float64": shown(step.error_float64),
      "error against autograd": optional(step.error_autograd),
      "error against finite differences": optional(step.error_finite_difference),
    }),
  ];
}

function scale() {
  return element("div", { className: "legend" },
    `error 1e${BEST}`.replace("-", "−"), element("span", { className: "ramp warm" }), `1e${WORST}`.replace("-", "−"));
}

function worst({ passes, comparisons, missing }) {
  if (passes === null) return "–";
  if (missing.length) return `missing: ${missing.join(", ")}`;
  const shares = comparisons.map(({ share_of_bound: share }) => share ?? NaN);
  return element("span", { title: shares.map(raw).join(", ") }, percent(Math.max(...shares)));
}
