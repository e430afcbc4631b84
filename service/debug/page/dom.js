// DOM elements and formatted numbers. Untrusted content is inserted as text, never as markup.

export function element(tag, properties = {}, ...children) {
  const { style = {}, data = {}, aria = {}, ...others } = properties;
  const made = Object.assign(document.createElement(tag), others);
  for (const [name, value] of Object.entries(style)) made.style.setProperty(name, value);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(`aria-${name}`, value);
  Object.assign(made.dataset, data);
  made.append(...children);
  return made;
}

export function table(caption, heads, rows) {
  const cells = (tag, row) =>
    element("tr", {}, ...row.map((cell) => element(tag, tag === "th" ? { scope: "col" } : {}, cell)));
  return element("div", { className: "scroll" }, element("table", {},
    element("caption", {}, caption),
    element("thead", {}, cells("th", heads)),
    element("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

export function facts(pairs) {
  const entries = Object.entries(pairs).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return element("dl", { className: "facts" }, ...entries);
}

// NaN arrives as null, because JSON cannot represent it.
export function shown(value, digits = 4) {
  if (value === null || Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const fits = size >= 10 ** (1 - digits) && size < 1e5;
  return withMinus(fits ? value.toFixed(digits) : value.toExponential(1).replace("+", ""));
}

// Round to the third significant digit of `scale`, with 1 to 12 decimals.
export function rounded(value, scale) {
  if (!Number.isFinite(value)) return shown(value);
  return withMinus(value.toFixed(Math.min(12, Math.max(1, 2 - Math.floor(Math.log10(scale || 1))))));
}

export function percent(share) {
  return Number.isFinite(share) ? `${(100 * share).toFixed(1)} %` : shown(share);
}

const withMinus = (number) => number.replaceAll("-", "−");

export function raw(value) {
  return value === null ? "NaN" : String(value);
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
