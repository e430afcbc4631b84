// Why a passage is not first, in sentences: what its distance to the first one is made of, and what to try next.

import { card, listed, muted, sentenceCase, sentences } from "./dom.js";
import { quoted } from "./deletion.js";
import { orderOf } from "./numbers.js";
import { nameOfPassage } from "./rank.js";
import { figure } from "./rank_row.js";
import { scoreBody } from "./questions.js";
import { isWord, largest, slice } from "./tokens.js";

// The largest number of tokens that the service takes for explanations: two passages, and the query in both.
const MAX_TOKENS = 20_000;
const MOST = 3;
// Small chunks show where the part of a passage is that the query is about. A reranker reads the query with each.
const chunking = ({ info }) => ({ strategy: "sentences", size: Math.min(64, Math.floor(info.limits.max_tokens / 2)) });

// Both passages explained, and the best chunk of one that the model does not read to its end.
export function expectedRequests({ query, passages, order, truncated }, index, model) {
  if (order[0] === index) return [];
  const body = (...indices) => scoreBody(query, indices.map((own) => passages[own].text), model);
  return [
    { key: "margin", body: { ...body(order[0], index), explain: { by: "auto", of: "both", max_tokens: MAX_TOKENS } } },
    ...(truncated[index] ? [{ key: "chunks", isOptional: true, body: { ...body(index), chunking: chunking(model) } }] : []),
  ].map((request) => ({ ...request, name: "comparison with the first passage", path: "score", isSecond: true }));
}

export function drawExpected(ranking, index, runs) {
  const { passages, order, scores } = ranking;
  const name = nameOfPassage(passages, index);
  if (order[0] === index) {
    return card(sentenceCase(`${name} is first`), muted(order.length > 1 ? `It has ${figure(scores[index] - scores[order[1]])} more than the next.` : "It is the only passage."));
  }
  return card(`Why is ${name} not first?`, sentences(whyNot(ranking, index, runs)));
}

function whyNot(ranking, index, runs) {
  const [margin, chunks] = ["margin", "chunks"].map((key) => runs.find((run) => run.key === key));
  const [first, own] = margin.result.explanations.map((explanation, at) =>
    (explanation ? sidesOf(explanation.texts, ranking, at === 0 ? ranking.order[0] : index) : null));
  const cut = chunks?.result ? chunkSentence(ranking, index, chunks, own) : null;
  return [
    marginSentence(ranking, index),
    ...(first ? [sentenceOfFirst(ranking, index, first)] : []),
    ...(first && own ? wordSentences(first.query, own.query) : ["The tokens of a request do not suffice to explain both passages."]),
    ...(cut ? [cut.sentence] : chunks?.problem ? [chunks.problem] : []),
    `Next: ${cut?.next ?? nextStep(ranking, index, own, first)}`,
  ].filter(Boolean);
}

const nounOf = (by) => by.slice(0, -1);

// The measured units of query and document, with their contents.
function sidesOf([query, document], ranking, index) {
  const inQuery = query.words?.length ? "words" : "units";
  const measured = (units, text) => units.filter(({ left_out: value }) => value !== null)
    .map((unit) => ({ ...unit, effect: unit.left_out, content: slice(text, unit) })).filter(isWord);
  return {
    query: measured(query[inQuery], ranking.query), queryNoun: inQuery === "words" ? "word" : nounOf(query.by),
    units: measured(document.units, ranking.passages[index].text), end: document.end,
    // The tokens of a request may not suffice for all units.
    noun: `${document.units.some(({ left_out: value }) => value === null) ? "measured " : ""}${nounOf(document.by)}`,
    // What a prediction is about: in an edited text, the unread part moves up.
    subject: ranking.truncated[index] ? "the part that the model reads" : null,
  };
}

const rankWith = ({ scores }, index, score) => orderOf(scores.with(index, score)).indexOf(index) + 1;

function marginSentence({ passages, order, scores }, index) {
  const [first] = order;
  return `It has rank ${order.indexOf(index) + 1} with ${figure(scores[index])}. ${sentenceCase(nameOfPassage(passages, first))}, the first, has ${figure(scores[first])}: ${figure(scores[first] - scores[index])} more.`;
}

const byEffect = (units) => units.toSorted((one, other) => other.effect - one.effect);
const withEffects = (units, effectOf = ({ effect }) => effect) => listed(units.map((unit) => `${quoted(unit)} (${figure(effectOf(unit), true)})`));

function sentenceOfFirst({ scores, order }, index, { units, noun, subject }) {
  const margin = scores[order[0]] - scores[index];
  const raising = byEffect(units.filter(({ effect }) => effect > 0));
  if (!raising.length) return `No ${noun} of the first passage raises its score.`;
  const [best] = raising;
  if (best.effect > margin) return `Without ${quoted(best)}, ${subject ? `${subject} of the first` : "the first"} would have ${figure(scores[order[0]] - best.effect)}, which is below this passage.`;
  return `The ${noun}s of the first that raise its score most: ${withEffects(raising.slice(0, MOST))}. None of them alone makes the difference.`;
}

function measuredInBoth(first, own) {
  return own.flatMap((word) => {
    const twin = first.find(({ start, end }) => start === word.start && end === word.end);
    return twin ? [{ ...word, first: twin.effect, more: twin.effect - word.effect }] : [];
  });
}

// Words of the query whose removal changes one score more than the other.
function wordSentences(first, own) {
  const pairs = measuredInBoth(first, own);
  const matter = largest(pairs.map(({ more }) => more)) / 10;
  const both = (words) => listed(words.map((word) => `${quoted(word)} (${figure(word.first, true)} there, ${figure(word.effect, true)} here)`));
  const [there, here] = [1, -1].map((sign) => pairs.filter(({ more, first: gain, effect }) => sign * more > matter && (sign > 0 ? gain : effect) > 0)
    .sort((one, other) => sign * (other.more - one.more)).slice(0, MOST));
  return [
    there.length ? `Of the query, the first gains more from ${both(there)}.` : "",
    here.length ? `This passage gains more from ${both(here)}.` : "",
  ];
}

// What the part behind the cut line would bring: the score of the best chunk, if it reaches behind the line.
function chunkSentence(ranking, index, { result: { scores: [score], best_chunks: [chunk] }, body: { chunking: { size } } }, own) {
  const length = [...ranking.passages[index].text].length;
  const end = own?.end ?? length;
  if (end >= length) return null;
  const content = slice(ranking.passages[index].text, chunk);
  const part = `The model reads ${end} of its ${length} characters.`;
  if (chunk.end <= end) return { sentence: `${part} Its best chunk of up to ${size} tokens is before the cut line.` };
  const rank = rankWith(ranking, index, score);
  return {
    sentence: `${part} Its best chunk of up to ${size} tokens ${chunk.start >= end ? "is" : "ends"} behind the cut line: ${quoted({ content })}, with ${figure(score)}.`,
    next: rank < rankWith(ranking, index, ranking.scores[index]) ? `divide it into chunks. By its best one it would have rank ${rank}, if the others stay as they are.` : null,
  };
}

function nextStep(ranking, index, own, first) {
  if (!own || !first) return "try another model.";
  const score = ranking.scores[index];
  const worst = byEffect(own.units).at(-1);
  const better = worst && own.units.length > 1 && worst.effect < 0 ? rankWith(ranking, index, score - worst.effect) : Infinity;
  if (better < rankWith(ranking, index, score)) return `edit it. Without ${quoted(worst)} ${own.subject ?? "it"} would have ${figure(score - worst.effect)} and rank ${better}.`;
  const pairs = measuredInBoth(first.query, own.query);
  const matter = largest(pairs.map((pair) => pair.first)) / 10;
  const missed = pairs.filter((pair) => pair.first > matter && pair.effect < pair.first / 2)
    .sort((one, other) => other.first - one.first).slice(0, MOST);
  if (missed.length) return `edit it to say more about ${listed(missed.map(quoted))}, from which it gains less than half as much as the first, or try another model.`;
  return `try another model: no ${own.noun} lowers its score enough to change its rank, and no measured ${own.queryNoun} of the query is missing.`;
}
