// Circuit diagram of add + norm: the forward pass runs down the left, the backward pass up the right.

import { diverging } from "./colours.js";
import { element, shown } from "./dom.js";
import { rove } from "./roving.js";

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

const [PITCH, BOX, WIDTH, GAP] = [44, 34, 270, 96];
const NARROW = 760;
// Ends of the colour scale, as powers of ten: a float32 rounding error, and an error that affects the
// served vectors.
const [BEST, WORST] = [-8, -3];

export function circuit(steps, wrong, choose) {
  const byName = new Map(steps.map((step) => [step.name, step]));
  // A phone has no room for both passes beside each other.
  const isNarrow = innerWidth < NARROW;
  const margin = isNarrow ? 30 : 44;
  const rows = Object.keys(BACKWARD).length;
  const height = rows * PITCH + 26;
  const columns = [
    { table: FORWARD, left: margin, down: 0, side: -1, place: (index) => index + 1 },
    { table: BACKWARD, left: isNarrow ? margin : margin + WIDTH + GAP, down: isNarrow ? height : 0, side: 1, place: (index, count) => count - 1 - index },
  ];
  const [width, total] = isNarrow ? [2 * margin + WIDTH, 2 * height] : [2 * margin + 2 * WIDTH + GAP, height];
  const wires = svg("svg", { width, height: total, viewBox: `0 0 ${width} ${total}`, "aria-hidden": "true" });
  wires.append(arrowHead());
  const boxes = columns.flatMap((column) => {
    const names = Object.keys(column.table);
    const top = (name) => column.down + 26 + PITCH * column.place(names.indexOf(name), names.length);
    for (const name of names) wires.append(...wiresInto(name, names, top, column));
    return names.filter((name) => byName.has(name)).map((name) =>
      box(byName.get(name), wrong[name], column.table[name][0], column.left, top(name), choose));
  });
  const heads = columns.map(({ left, down }, place) =>
    element("h4", { style: { left: `${left}px`, top: `${down}px` } }, place ? "backward, up" : "forward, down"));
  const drawing = element("div", {
    className: "circuit", role: "toolbar", aria: { label: "Steps of add + norm", orientation: "vertical" },
    style: { width: `${width}px`, height: `${total}px` },
  }, wires, ...heads, ...boxes);
  rove(drawing, boxes);
  return element("div", { className: "scroll" }, drawing);
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

function box(step, wrong, formula, left, top, choose) {
  const error = step.error_float64;
  const finite = Number.isFinite(error);
  const weight = error === 0 ? 0 : Math.min(1, Math.max(0, (Math.log10(error) - BEST) / (WORST - BEST)));
  const made = element("button", {
    type: "button",
    className: `step${finite ? "" : " broken"}${wrong ? " wrong" : ""}`,
    style: { left: `${left}px`, top: `${top}px`, width: `${WIDTH}px`, height: `${BOX}px`, ...(finite && diverging(weight, 1)) },
    data: { step: step.name },
  }, element("strong", {}, step.name), element("span", { className: "formula" }, formula), element("span", { className: "error" }, wrong ? `✗ ${wrong}` : shown(error)));
  for (const event of ["click", "focus", "mouseenter"]) made.addEventListener(event, () => choose(step));
  return made;
}

export function errorScale() {
  return element("div", { className: "legend" },
    `error 1e${BEST}`.replace("-", "−"), element("span", { className: "ramp warm" }), `1e${WORST}`.replace("-", "−"));
}
