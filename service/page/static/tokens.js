// Tokens and words of texts as chips, coloured by their scores.

import { diverging } from "./colours.js";
import { count, element, embedded, exact, notation, raw } from "./dom.js";
import { sum } from "./numbers.js";
import { rove } from "./roving.js";

// Offsets from the service count code points, but string indices count UTF-16 code units, at most two of them for each.
export const slice = (text, { start, end = text.length }) => [...text.slice(0, 2 * end)].slice(start, end).join("");

// A browser takes a minute to lay out a million characters.
const MOST_DRAWN = 10_000;
export function beginning(text) {
  const drawn = slice(text, { start: 0, end: MOST_DRAWN });
  return drawn === text ? text : `${drawn} … (${count([...text].length - MOST_DRAWN, "more character")}, not shown)`;
}

// Neither a special token nor punctuation: letters, digits, emoji or flags.
export const isWord = ({ text, content }) => text !== null && /[\p{L}\p{N}\p{Extended_Pictographic}\p{Regional_Indicator}]/u.test(content);

const bracketed = (token) => (/^\[.+\]$/.test(token) ? token : `[${token}]`);

// White space of Python's str.strip, by which the service removes words.
const SPACE = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]";
const [STARTS, ENDS, BLANK] = [`^${SPACE}+`, `${SPACE}+$`, `^${SPACE}*$`].map((pattern) => new RegExp(pattern, "u"));

// The text without units, the last first, by the rule of the service: white space on one side of a unit goes too if
// white space or an end of the text is on both sides.
export const without = (text, units) => [...units].sort((one, other) => other.start - one.start).reduce((rest, { start, end }) => {
  const before = slice(rest, { start: 0, end: start });
  const after = slice(rest, { start: end });
  const isSpaced = (!before || ENDS.test(before)) && (!after || STARTS.test(after));
  const joined = !isSpaced ? before + after : after ? before + after.replace(STARTS, "") : before.replace(ENDS, "");
  return BLANK.test(joined) ? "" : joined;
}, text);

// The tokens of a text, or its words and, in their places, the tokens that belong to no word.
export function unitsOf(tokens, words, texts, kind) {
  const single = tokens.map((token, index) => ({
    first: index,
    tokens: [index],
    input: token.input,
    text: token.text,
    content: token.start === null ? bracketed(token.token) : slice(texts[token.text], token),
    spelled: token.token,
  }));
  if (kind === "tokens") return single;
  const whole = words.map((word) => {
    const first = tokens[word.tokens[0]];
    return {
      first: word.tokens[0],
      tokens: word.tokens,
      input: first.input,
      text: first.text,
      content: slice(texts[first.text], word),
      spelled: word.tokens.map((index) => tokens[index].token).join(" + "),
    };
  });
  return [...single.filter(({ text }) => text === null), ...whole].sort((a, b) => a.first - b.first);
}

export const total = (unit, scores) => sum(unit.tokens.map((index) => scores[index]));

// Units by text: one list for each input of the model with the text. A special token belongs to the
// text before it or, at the start of an input, after it.
export function byText(units) {
  const texts = [];
  for (const unit of units) {
    const own = units.filter(({ input, text }) => input === unit.input && text !== null);
    const { text } = own.findLast(({ first }) => first <= unit.first) ?? own[0];
    ((texts[text] ??= [])[unit.input] ??= []).push(unit);
  }
  return texts.map((inputs) => inputs.filter(Boolean));
}

export function largest(scores) {
  // Pairs of words are more numbers than a call may have arguments.
  return scores.reduce((most, score) => (Number.isFinite(score) ? Math.max(most, Math.abs(score)) : most), 0);
}

// A row of chips, which is one tab stop. `paint(scores, scale)` colours them. `select` is
// called with the index of the focused or hovered chip, and with null when it is left. With the `side` of a text, chips
// are buttons, see whatif.js.
export function chips(units, name, select = () => {}, side = undefined) {
  const scoreOf = units.map(() => element("span", { className: "score", dir: "ltr" }));
  const items = units.map((unit, index) => element(side ? "button" : "li", {
    className: `chip${unit.text === null ? " special" : unit.isSentence ? " sentence" : ""}${unit.isOpposite ? " opposite" : ""}`,
    ...(side ? { type: "button", aria: { pressed: "false" } } : { role: "option", aria: { selected: "false" } }),
  }, element("span", { className: "word", ...(unit.text === null ? { dir: "ltr" } : {}) }, unit.content), " ", scoreOf[index]));
  const readout = element("p", { className: "readout muted" });
  // The words of a text in Arabic or Hebrew run from right to left. Special tokens do not decide it.
  const list = side ? element("div", { className: "chips", dir: "auto", role: "toolbar", data: { side }, aria: { label: name } }, ...items)
    : element("ol", { className: "chips", dir: "auto", role: "listbox", aria: { label: name } }, ...items);
  rove(list, items);
  let scores = [];
  const choose = (index) => {
    if (!side) items.forEach((item, at) => { item.ariaSelected = String(at === index); });
    if (index !== null) readout.textContent = `${embedded(units[index].content)} (${embedded(units[index].spelled)}): ${scores[index] === null ? "not measured" : exact(scores[index])}`;
    select(index);
  };
  items.forEach((item, index) => {
    item.addEventListener("focus", () => choose(index));
    item.addEventListener("mouseenter", () => choose(index));
  });
  list.addEventListener("mouseleave", () => { if (!list.contains(document.activeElement)) choose(null); });
  list.addEventListener("focusout", (event) => { if (!list.contains(event.relatedTarget)) choose(null); });
  const paint = (values, scale) => {
    scores = values;
    const { show } = notation(scale);
    items.forEach((item, index) => {
      for (const [property, value] of Object.entries(diverging(values[index] ?? 0, scale))) item.style.setProperty(property, value);
      item.dataset.score = raw(values[index]);
      scoreOf[index].textContent = values[index] === null ? "–" : show(values[index]);
    });
  };
  return { node: element("div", { className: "passage-chips" }, list, readout), paint };
}

// Chips with fixed scores.
export function scored(units, scores, scale, name, side = undefined) {
  const made = chips(units, name, undefined, side);
  made.paint(scores, scale);
  return made.node;
}

// The scale of the colours. Only signed scores have a negative end. `ends`: what both ends mean.
export function legend(scale, { isSigned = true, ends: [low = "", high = ""] = [] } = {}) {
  const { show, unit } = notation(scale);
  return element("div", { className: "legend", aria: { hidden: "true" } },
    `${low} ${isSigned ? show(-scale) : "0"}`,
    element("span", { className: `ramp ${isSigned ? "diverging" : "warm"}` }),
    `${isSigned ? "+" : ""}${show(scale)} ${unit} ${high}`);
}
