// Tokens and words of texts as chips, coloured by their scores.

import { colour } from "./charts.js";
import { element, raw, rounded } from "./dom.js";

// The characters of a token in the text or, for special tokens and prompts, its vocabulary spelling.
export function spelling(token, text) {
  return token.start === null ? token.token : part(text, token);
}

// Offsets from the service count code points, but string indices count UTF-16 code units.
const part = (text, { start, end }) => [...text].slice(start, end).join("");

const bracketed = (token) => (/^\[.+\]$/.test(token) ? token : `[${token}]`);

// The tokens of a result, or its words and, in their places, the tokens that belong to no word.
export function unitsOf({ tokens, words, scores }, texts, kind) {
  const single = tokens.map((token, index) => ({
    first: index,
    input: token.input,
    text: token.text,
    content: token.start === null ? bracketed(token.token) : part(texts[token.text], token),
    spelled: token.token,
    score: scores[index],
  }));
  if (kind === "tokens") return single;
  const whole = words.map((word) => ({
    first: word.tokens[0],
    input: tokens[word.tokens[0]].input,
    text: word.text,
    content: part(texts[word.text], word),
    spelled: word.tokens.map((index) => tokens[index].token).join(" + "),
    score: word.score,
  }));
  return [...single.filter(({ text }) => text === null), ...whole].sort((a, b) => a.first - b.first);
}

// Units by text: one list for each input of the model with the text. A special token belongs to the
// text before it or, at the start of an input, after it.
export function byText(units) {
  const texts = [];
  for (const unit of units) {
    const named = units.filter(({ input, text }) => input === unit.input && text !== null);
    const { text } = named.findLast(({ first }) => first <= unit.first) ?? named[0];
    ((texts[text] ??= [])[unit.input] ??= []).push(unit);
  }
  return texts.map((inputs) => inputs.filter(Boolean));
}

export function largest(scores) {
  return Math.max(0, ...scores.filter(Number.isFinite).map(Math.abs));
}

export function chips(units, scale) {
  return element("ol", { className: "chips" }, ...units.map(({ text, content, spelled, score }) =>
    element("li", {
      className: text === null ? "chip special" : "chip",
      title: `${spelled}: ${raw(score)}`,
      tabIndex: 0,
      data: { score: raw(score) },
      style: chipColours(score, scale),
    }, element("span", { className: "word" }, content), element("span", { className: "score" }, rounded(score, scale)))));
}

export function legend(scale) {
  return element("div", { className: "legend", aria: { hidden: "true" } },
    rounded(-scale, scale), element("span", { className: "ramp diverging" }), `+${rounded(scale, scale)}`);
}

function chipColours(score, scale) {
  if (!Number.isFinite(score)) return { background: "transparent", color: colour("bad") };
  const weight = scale ? score / scale : 0;
  const [half, end] = weight < 0 ? ["low-half", "low"] : ["high-half", "high"];
  const size = Math.abs(weight);
  const background = size < 0.5
    ? mixed(colour("neutral"), colour(half), size * 2)
    : mixed(colour(half), colour(end), size * 2 - 1);
  return { background: css(background), color: readable(background) };
}

function mixed(from, to, weight) {
  const numbers = (hex) => [1, 3, 5].map((index) => parseInt(hex.slice(index, index + 2), 16));
  const [start, stop] = [numbers(from), numbers(to)];
  return start.map((channel, index) => Math.round(channel + (stop[index] - channel) * weight));
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

// Black or white text, whichever has the higher contrast by WCAG's relative luminance.
export function readable(rgb) {
  const linear = rgb.map((channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#101418" : "#ffffff";
}

// Colours for an unsigned size from 0 (neutral) to 1 (warm end of the scale).
export function warmth(weight) {
  const background = weight < 0.5
    ? mixed(colour("neutral"), colour("high-half"), weight * 2)
    : mixed(colour("high-half"), colour("high"), weight * 2 - 1);
  return { background: css(background), color: readable(background) };
}
