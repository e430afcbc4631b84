// DOM elements and formatted numbers. Untrusted content is inserted as text, never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const { style = {}, data = {}, aria = {}, role, ...others } = properties;
  const made = Object.assign(document.createElement(tag), others);
  if (role) made.setAttribute("role", role);
  for (const [name, value] of Object.entries(style)) made.style.setProperty(name, value);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(`aria-${name}`, value);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}

export const muted = (...content) => element("p", { className: "muted" }, ...content);

const MOST_NAMED = 5;

// The first problems of runs without a result.
export const problemsOf = (runs) => runs.filter(({ problem }) => problem).slice(0, MOST_NAMED).map(({ problem }) => muted(problem));

export function card(title, ...content) {
  return element("section", { className: "card" }, element("h3", {}, title), ...content);
}

export function details(summary, ...content) {
  return element("details", {}, element("summary", {}, summary), ...content);
}

export function facts(pairs) {
  const entries = Object.entries(pairs).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element("dl", { className: "facts" }, ...entries);
}

export function sentences(list) {
  return element("ul", { className: "sentences" }, ...list.map((sentence) => element("li", {}, sentence)));
}

// NaN arrives as null, because JSON cannot represent it.
export function shown(value, digits = 4) {
  if (value === null || Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const fits = size >= 10 ** (1 - digits) && size < 1e5;
  return fits ? fixed(value, digits) : withMinus(value.toExponential(1).replace("+", ""));
}

// With decimals; a value that is rounded to zero has no sign.
export function fixed(value, decimals) {
  const text = value.toFixed(decimals);
  return withMinus(Number(text) === 0 ? text.replace("-", "") : text);
}

// With a sign, for differences.
export const signed = (value, digits) => (value > 0 ? `+${shown(value, digits)}` : shown(value, digits));

// Round to the third significant digit of `scale`, with 1 to 12 decimals.
export function rounded(value, scale) {
  if (!Number.isFinite(value)) return shown(value);
  return fixed(value, Math.min(12, Math.max(1, 2 - Math.floor(Math.log10(scale || 1)))));
}

const UNITS = [[1, ""], [1e3, "thousandths"], [1e6, "millionths"], [1e9, "billionths"], [1e12, "trillionths"]];

// How to show the numbers of a row or matrix, in a unit in which the largest is not below 0.01.
export function notation(scale) {
  const [factor, unit] = UNITS.find(([times]) => scale * times >= 0.01) ?? UNITS[0];
  return { unit, show: (value) => rounded(value * factor, scale * factor) };
}

export function percent(share) {
  return Number.isFinite(share) ? `${fixed(100 * share, 1)} %` : shown(share);
}

const withMinus = (number) => number.replaceAll("-", "−");

// All digits, for exports and sorting.
export function raw(value) {
  return value === null ? "NaN" : String(value);
}

// The six digits that float32 has, for readers.
export function exact(value) {
  return Number.isFinite(value) ? withMinus(String(Number(value.toPrecision(6)))) : shown(value);
}

export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// Unicode's blocks of scripts that run from right to left, and its mark of that direction.
const RIGHT_TO_LEFT = /[\u0590-\u08ff\u200f\ufb1d-\ufdff\ufe70-\ufeff\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

// A text within a sentence, so that neither its direction nor its control characters reorder the rest of the sentence.
export function embedded(text) {
  const plain = text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (control) => `\\u${control.codePointAt(0).toString(16)}`);
  return RIGHT_TO_LEFT.test(plain) ? `\u2068${plain}\u2069` : plain;
}

export const sentenceCase = (sentence) => sentence.replace(/^./u, (first) => first.toUpperCase());

export function listed(items, last = "and") {
  return items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} ${last} ${items.at(-1)}`;
}

// A coloured verdict; `passes` is true, false, or null without a verdict.
export function mark(passes, words = ["passes", "fails", "no verdict"]) {
  const [state, word] = passes === null ? ["off", words[2]] : passes ? ["good", words[0]] : ["bad", words[1]];
  return element("span", { className: `mark ${state}` }, word);
}

export function lamp(name, passes, words) {
  const state = passes === null ? "off" : passes ? "good" : "bad";
  return element("li", { className: `lamp ${state}` },
    element("span", { className: "bulb", aria: { hidden: "true" } }),
    element("strong", {}, name), " ", element("span", {}, words));
}
