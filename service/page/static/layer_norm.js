// Verdicts on the implementations of add + norm, and the steps of the reference implementation.

import { circuit, errorScale } from "./circuit.js";
import { details, element, facts, listed, mark, muted, raw, sentences, shown } from "./dom.js";
import { number, table } from "./tables.js";

const VERDICTS = [
  "All implementations are correct on these rows.",
  "An implementation is wrong on these rows.",
  "These rows cannot decide whether the implementations are correct.",
];

// Names of the results as in other projects, and the step of the circuit that computes each.
const RESULTS = {
  out: { name: "out (y)", step: "out" },
  sum: { name: "sum", step: "x" },
  dx: { name: "dx", step: "dx" },
  dresidual: { name: "dresidual", step: "dx" },
  dgamma: { name: "dgamma (dweight)", step: "dgamma" },
  dbeta: { name: "dbeta (dbias)", step: "dbeta" },
};

export function drawLayerNorm([{ result }]) {
  const chosen = element("aside", { className: "chosen", aria: { live: "polite", label: "The chosen step" } });
  const choose = (step) => chosen.replaceChildren(...statistics(step));
  choose(result.steps.find(({ name }) => name === "out") ?? result.steps[0]);
  const failures = failuresOf(result.verdicts);
  return [
    element("p", { className: "verdict" }, mark(result.passes, VERDICTS)),
    sentences(result.verdicts.flatMap(({ implementation, failures: found }) => found.map((failure) => `${implementation}: ${failure}.`))),
    comparisonTable(result.verdicts),
    verdictTable(result.verdicts),
    element("h3", {}, "Steps of the reference implementation, in float32"),
    muted(failures.length
      ? "The numbers are errors of the reference implementation, which is correct. A step with a cross is where another implementation is wrong."
      : "The numbers are errors against float64, relative to the largest value of the step."),
    element("div", { className: "bench" }, circuit(result.steps, wrongSteps(failures), choose), element("div", {}, errorScale(), chosen)),
    details("Invariants of the operator", table("Identities that hold on every row", ["Invariant", "Pass", "Deviation", "Bound", "Verdict"], result.invariants.map((invariant) =>
      [invariant.name, invariant.phase, number(invariant.residual), number(invariant.bound), mark(invariant.passes)]))),
  ];
}

// The wrong results of each implementation.
function failuresOf(verdicts) {
  return verdicts.filter(({ passes }) => passes === false).flatMap(({ implementation, phase, comparisons, missing, invariants }) => [
    ...missing, ...comparisons.filter(({ passes }) => !passes).map(({ value }) => value),
    ...invariants.filter(({ passes }) => !passes).map(() => (phase === "forward" ? "out" : "dx")),
  ].map((value) => ({ value, implementation })));
}

const nameOf = (value) => RESULTS[value]?.name ?? value;

// The implementations that are wrong, by step of the circuit.
function wrongSteps(failures) {
  const byStep = {};
  for (const { value, implementation } of failures) (byStep[RESULTS[value]?.step] ??= new Set()).add(implementation);
  return Object.fromEntries(Object.entries(byStep).map(([step, names]) => [step, listed([...names])]));
}

// Wrong results come first, then those closest to their bounds.
function comparisonTable(verdicts) {
  const rows = verdicts.flatMap(({ implementation, comparisons }) => comparisons.map((comparison) => ({ implementation, ...comparison })));
  rows.sort((left, right) => left.passes - right.passes || right.share_of_bound - left.share_of_bound);
  if (!rows.length) return "";
  return table("Every result against its reference", ["Implementation", "Result", "Against", "Largest error", "In ulp", "Times its bound", "Where", "Is", "Should be", "Verdict"],
    rows.map((row) => [
      row.implementation, nameOf(row.value), row.against, number(row.max_abs), number(row.ulp, shown(row.ulp, 1)),
      number(row.share_of_bound, Number.isFinite(row.share_of_bound) ? row.share_of_bound.toFixed(2) : shown(row.share_of_bound)),
      row.against === "float64" ? `[${row.worst_index.join(", ")}]` : "–",
      number(row.actual), number(row.expected), mark(row.passes),
    ]));
}

function verdictTable(verdicts) {
  return table("Implementations", ["Implementation", "Pass", "Verdict", "Missing, or reason for no verdict"], verdicts.map((verdict) =>
    [verdict.implementation, verdict.phase, mark(verdict.passes), verdict.no_verdict ?? (verdict.missing.map(nameOf).join(", ") || "–")]));
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
    ...(step.values ? [element("h4", {}, "Values of the row"), element("p", { className: "values" }, step.values.map((value) => raw(value)).join(", "))] : []),
  ];
}
