// The first answer: what the result is without each word or sentence, measured by the serving process.

import { card, details, element, embedded, exact, listed, muted, shown, signed } from "./dom.js";
import { number, table } from "./tables.js";
import { isWord, largest, legend, scored, slice } from "./tokens.js";

const DOCUMENTS = ["Query", "Document", "Other document"];
export const textNames = (kind, isPair) =>
  kind === "embedding" ? ["Text A", "Text B", "Text C"] : kind === "classifier" ? (isPair ? ["First text", "Second text"] : ["Text"]) : DOCUMENTS;

const SCORES = {
  cross_encoder: "score (logit)", cosine: "cosine similarity", dot: "dot product",
  euclidean: "negative Euclidean distance", manhattan: "negative Manhattan distance", maxsim: "MaxSim",
};

// The name of the explained number, to follow "the".
export const nameOf = ({ result }) => SCORES[result.kind] ?? `score of ${embedded(result.explanations[0].label)}`;

// The explained texts with their units. `score` is what is shown, with two documents the part of the difference
// between their scores; `leftOut` is of the first document's score, as `whole`.
export function explainedTexts({ body, result }, model) {
  // The tokens of the request may not suffice for the other document.
  const [first, other] = result.explanations.map((explanation) => explanation?.texts);
  const contents = body.queries === undefined ? [body.inputs].flat(2) : [body.queries, ...body.documents];
  const names = textNames(model.kind, first.length > 1);
  const named = (explained, index) => ({
    ...explained, name: names[index], input: "abc"[index], content: contents[index],
    units: explained.units.map((unit) => shownUnit(unit, contents[index], explained.by)),
    words: (explained.words ?? []).map((unit) => shownUnit(unit, contents[index], "words")),
  });
  const texts = first.map(named);
  return other ? difference(texts, [other[0], other[1]].map((explained, index) => named(explained, 2 * index))) : texts;
}

const shownUnit = (unit, content, by) =>
  ({ ...unit, leftOut: unit.left_out, score: unit.left_out, text: 0, content: slice(content, unit), isSentence: by === "sentences" });

// The words of the query have two effects; those of the other document speak against the document.
function difference([query, document], [again, other]) {
  const less = (value, subtracted) => (value === null || (subtracted ?? null) === null ? null : value - subtracted);
  const minus = (unit) => ({ ...unit, score: less(0, unit.score), alone: less(0, unit.alone) });
  const both = (units, others) => units.map((unit) => {
    const twin = others.find(({ start, end }) => start === unit.start && end === unit.end);
    return { ...unit, score: less(unit.score, twin?.score), alone: less(unit.alone, twin?.alone) };
  });
  return [
    { ...query, units: ranked(both(query.units, again.units)), words: ranked(both(query.words, again.words)) },
    document,
    { ...other, units: ranked(other.units.map(minus)), words: ranked(other.words.map(minus)) },
  ];
}

function ranked(units) {
  const order = [...units].sort((one, other) => other.score + other.alone - one.score - one.alone);
  return units.map((unit) => ({ ...unit, rank: order.indexOf(unit) + 1 }));
}

export function deletionCard(run, model) {
  const texts = explainedTexts(run, model);
  const units = texts.flatMap(({ name: text, units: own, words }) => [...own, ...words].map((unit) => ({ ...unit, name: text })));
  const least = roundingOf(texts);
  const scale = Math.max(least, largest(units.map(({ score }) => score)));
  const [, above, below] = texts;
  const name = below ? "difference" : nameOf(run);
  return card(below ? `Words that speak for ${inSentence(above.name)} or for ${inSentence(below.name)}` : `Words that raise or lower the ${name}`,
    element("div", { className: "evidence" },
      element("div", {},
        element("div", { className: "heading" },
          element("p", {}, bestSentence(texts, name, least)),
          legend(scale, { ends: below ? [below, above].map((text) => `for ${inSentence(text.name)}`) : [] })),
        ...negationSentences(texts, name).map((sentence) => element("p", {}, sentence)),
        ...texts.map((text, index) => passage(text, scale, index < 2, text === below ? otherSentence(text) : ""))),
      element("div", { className: "slot" })), // of the counterfactuals, see whatif.js
    ...[...texts.map(cutSentence), unknownSentence(texts), nullSentence(run, texts), checkSentence(run, texts)].filter(Boolean).map((sentence) => muted(sentence)),
    details("Exact numbers",
      table(`Effect of each word or sentence on the ${name}`, ["Word or sentence", "Text", "Left out", "Alone", "Rank"],
        units.map((unit) => [unit.content, unit.name, measured(unit.score), measured(unit.alone), number(unit.rank, String(unit.rank))]))));
}

const measured = (value) => (value === null ? "not measured" : number(value));

const otherSentence = ({ name }) =>
  `A word that raises the score of ${inSentence(name)} lowers the difference: its number here is negative.`;

// Units with a side can be struck out.
function passage({ name, input, units, words }, scale, canStrike, sentence) {
  const row = (own, label, side) => scored(own.map((unit) => ({ ...unit, spelled: `alone ${unit.alone === null ? "not measured" : exact(unit.alone)}, rank ${unit.rank}` })),
    own.map(({ score }) => score), scale, label, side);
  return element("section", { className: "passage" },
    element("h4", {}, name), ...(sentence ? [muted(sentence)] : []), row(units, `Effects in ${inSentence(name)}`, canStrike ? input : undefined),
    ...(words.length ? [element("h4", {}, "Words of the sentences that rank first"), row(words, `Words of ${inSentence(name)}`)] : []));
}

export const inSentence = (name) => (name.startsWith("Text ") ? name.replace("T", "t") : `the ${name.toLowerCase()}`);

const MOST_LETTERS = 60;
const MOST_UNKNOWN = 5;
export const quoted = ({ content }) => `“${embedded(slice(content, { start: 0, end: MOST_LETTERS }))}${[...content].length > MOST_LETTERS ? "…" : ""}”`;

// The result of a text depends on its batch, by up to a few millionths.
const ROUNDING = 1e-5;
export const roundingOf = (texts) => ROUNDING * largest(texts.map(({ whole }) => whole));

// The least size of an effect that matters: a tenth of the largest.
export const matterOf = (units) => largest(units.map(({ score }) => score)) / 10;

// The units with the largest effects, each with its text. Those of a difference speak for one of its documents.
function bestSentence(texts, name, least) {
  const [, above, below] = texts;
  const units = texts.flatMap((text) => text.units.map((unit) => ({ ...unit, in: text })))
    .filter((unit) => unit.score !== null && isWord(unit));
  const matter = Math.max(least, matterOf(units));
  const list = (sign) => {
    const best = units.filter(({ score }) => sign * score > 0 && sign * score >= matter).sort((one, other) => sign * (other.score - one.score)).slice(0, 3);
    return [listed(best.map((unit) => `${quoted(unit)}${texts.length > 1 ? ` (${inSentence(unit.in.name)})` : ""}`)), best.length];
  };
  const [[raising, up], [lowering, down]] = [list(1), list(-1)];
  if (!up && !down) return `No word changes the ${name}.`;
  if (below) {
    return [[raising, up, above], [lowering, down, below]].map(([words, number, document]) =>
      `${number ? `${words} speak${number === 1 ? "s" : ""} most` : "No word speaks"} for ${inSentence(document.name)}.`).join(" ");
  }
  return [
    up ? `${raising} raise${up === 1 ? "s" : ""} the ${name} most.` : `No word raises the ${name}.`,
    down ? `${lowering} lower${down === 1 ? "s" : ""} it most.` : "",
  ].filter(Boolean).join(" ");
}

// Whether the model reads a part of the text alone, of which all variants are made.
export const isCut = ({ start, end, content }) => start > 0 || end < [...content].length;

function cutSentence(text) {
  if (!isCut(text)) return "";
  return `The model reads characters ${text.start} to ${text.end} of the ${[...text.content].length} of ${inSentence(text.name)}; the rest has no effect.`;
}

export function unknownSentence(texts) {
  const lacked = texts.flatMap(({ unknown = [], content, name }) => {
    const parts = [...new Set(unknown.map((span) => quoted({ content: slice(content, span) })))];
    const more = parts.length > MOST_UNKNOWN ? [`${parts.length - MOST_UNKNOWN} more`] : [];
    return parts.length ? [`${listed([...parts.slice(0, MOST_UNKNOWN), ...more])} of ${inSentence(name)}`] : [];
  });
  return lacked.length ? `The vocabulary lacks ${listed(lacked)}: the model cannot tell such parts apart.` : "";
}

function nullSentence({ body: { documents = [] } }, texts) {
  const all = texts.flatMap(({ units, words }) => [...units, ...words]);
  const empty = texts.filter(({ empty: value }) => value === null).map(({ name }) => inSentence(name));
  return [
    documents.length === 2 && texts.length < 3 ? "The request has no tokens left for the other document." : "",
    all.some(({ score }) => score === null) ? `“–” was not measured: the rest of the text has no tokens, or the request has no tokens left for it${texts.length > 2 ? ", or it was measured for one of the documents alone" : ""}.` : "",
    empty.length ? `Nothing is measured alone in ${listed(empty)}: the empty text has no tokens for this model.` : "",
  ].filter(Boolean).join(" ");
}

// Negations of English alone: other languages have other words for it, and some none.
const NEGATION = /^(?:no|not|nor|never|none|nobody|nothing|nowhere|neither|cannot|without|\p{L}+n['’]t)$/iu;
// Of the largest effect of a word. Below this, the negation hardly moves the result.
const HARDLY = 0.25;

// Negations whose effect is small beside those of other words. In a difference, the effects on both documents can
// cancel each other, which says nothing about the model.
function negationSentences(texts, name) {
  if (texts.length > 2) return [];
  const words = texts.flatMap((text) => (text.by === "words" ? text.units : text.words).map((unit) => ({ ...unit, in: text }))).filter(({ score }) => score !== null);
  const most = largest(words.map(({ score }) => score));
  return words.filter((unit) => NEGATION.test(unit.content) && Math.abs(unit.score) < HARDLY * most).map((unit) =>
    `The model hardly sees the negation ${quoted(unit)} of ${inSentence(unit.in.name)}: without it the ${name} changes by ${signed(-unit.score)}, without another word by up to ${shown(most)}.`);
}

// How anybody can check a number.
function checkSentence({ path, body }, texts) {
  const isPlain = (unit) => isWord(unit) && unit.leftOut && unit.leftOut === unit.score;
  const text = texts.find(({ units }) => units.some(isPlain));
  if (!text) return "";
  const unit = text.units.filter(isPlain).reduce((one, other) => (Math.abs(other.leftOut) > Math.abs(one.leftOut) ? other : one));
  // A text that is cut is cut elsewhere beside another one.
  const part = !texts.some(isCut) ? "the text" : texts.length > 1 ? "the parts of the texts that the model reads" : "the part of the text that the model reads";
  const raw = body.raw_scores ? " with raw_scores" : "";
  return `To check a number, send ${part} without the ${unit.isSentence ? "sentence" : "word"} to /${path}${raw}: without ${quoted(unit)} in ${inSentence(text.name)} the result`
    + ` is ${shown(text.whole - unit.leftOut)} in place of ${shown(text.whole)}, so its number is ${signed(unit.leftOut)}.`;
}
