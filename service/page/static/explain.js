// The first view: why a model gave its result, in sentences and pictures, by kind of model.

import { alignmentTables, namesOf, passages, ranking, rowLegend, rowsOf, totals, valueName } from "./attribution.js";
import { card, details, element, listed, muted, percent, shown } from "./dom.js";
import { faithfulness } from "./faithfulness.js";
import { completeness, equation, isWord, pairCards, pairSentence, pairsOf } from "./pairs.js";
import { headline, landmarks, SIMILARITIES, similarityReading } from "./reading.js";
import { number, table } from "./tables.js";

export function drawExplanation(runs, inputs, model) {
  const byKey = Object.fromEntries(runs.map((run) => [run.key, run]));
  const nodes = model.kind === "embedding" ? similarity(byKey, inputs, SIMILARITIES[model.similarity]) : scoreOfOne(byKey, inputs, model);
  return element("div", { className: "explanation" }, ...nodes);
}

// Distances have no pairs: they are no sums over the pairs of words.
function similarity({ pair, reference, a, b }, { units }, kind) {
  const value = pair ? pair.result.similarity : a?.result?.value;
  if (value === undefined) return [];
  const known = reference?.result ? landmarks(reference.result.embeddings, kind) : null;
  const directions = [[a, "Text A"], [b, "Text B"]].filter(([run]) => run?.result);
  const [words, map] = pair ? pairCards(pair, units, kind.name) : [];
  return [
    similarityReading(value, kind, known,
      directions.length === 2 || !pair ? wordSentence(directions) : pairSentence(pairsOf(pair, units))),
    ...(reference?.problem ? [muted(reference.problem)] : []),
    effects(directions, units, kind),
    ...(pair ? [words] : []),
    slot(),
    ...(pair ? [details("Every pair of words", map)] : []),
    details("How exact are these numbers?", ...(pair ? [equation(pair.result, kind.name)] : []),
      element("div", { className: "columns" },
        ...(pair?.result.completeness ?? []).map((complete, index) =>
          element("div", {}, element("h4", {}, `Path integral of the pairs, text ${"AB"[index]}`), completeness(complete))),
        ...directions.map(([run, name]) =>
          element("div", {}, element("h4", {}, `Integrated gradients of ${name.replace("T", "t")}`), totals(run.result, run.body.target))))),
  ];
}

// The place of the counterfactuals, see whatif.js.
const slot = () => element("div", { className: "slot" });

function effects(directions, units, { name: kind }) {
  const heading = "Which words carry the similarity?";
  if (!directions.length) return card(heading, muted("Not computed yet: the effect of each word by itself."));
  const rows = directions.map(([run]) => rowsOf(run, units)[0]);
  return card(heading,
    element("div", { className: "heading" },
      muted(`How much each word adds to the ${kind} of the baseline, a text of padding (integrated gradients).`),
      rowLegend(rows)),
    ...passages(rows, directions.map(([, name]) => name)),
    ...directions.map(([run, name]) => muted(sumSentence(run.result, name, kind))),
    element("div", { className: "columns" }, ...directions.map(([run, name]) => element("div", {}, ...faithfulness(run.result, ` of ${name.replace("T", "t")}`)))));
}

// The words with the largest effects. Until both texts have them, the strongest pairs are named.
function wordSentence(directions) {
  const named = directions.map(([run, name]) => {
    const best = rowsOf(run, "words")[0].filter((unit) => isWord(unit) && unit.score > 0).sort((left, right) => right.score - left.score);
    return best.length && `${listed(best.slice(0, 2).map(({ content }) => `“${content}”`))} of ${name.replace("T", "t")}`;
  }).filter(Boolean);
  return named.length ? `The words that carry most of it are ${listed(named)}.` : "No word makes the texts more similar.";
}

// How the scores of a text add up to the similarity.
const sumSentence = ({ sum, baseline_value: baseline, value }, name, kind) =>
  `Baseline: with padding in place of its words, ${name.replace("T", "t")} has a ${kind} of ${shown(baseline)} with the other text. Its words add ${shown(sum)}, which gives ${shown(value)}.`;

const READINGS = {
  reranker: ({ result }, { body }) => {
    const [score, other] = result.scores;
    const place = body.documents.length > 1 ? [`The document ranks ${score >= other ? "above" : "below"} the other one, whose score is ${shown(other)}.`] : [];
    return headline(shown(score), "score (logit)", `A logit of ${shown(score)} is a relevance of ${percent(1 / (1 + Math.exp(-score)))}.`, ...place);
  },
  multi: ({ result }, { body }) => {
    const [score, other] = result.scores;
    const place = body.documents.length > 1 ? [`The document ranks ${score >= other ? "above" : "below"} the other one, whose MaxSim is ${shown(other)}.`] : [];
    return headline(shown(score), "MaxSim", "Each query token is matched with its most similar document token; MaxSim is the sum.", ...place);
  },
  classifier: ({ result }) => {
    const [[best, next]] = result.labels;
    return headline(best.label, `with a probability of ${percent(best.score)}`,
      next ? `The next label is ${next.label}, with ${percent(next.score)}.` : "",
      table("Labels", ["Label", "Probability"], result.labels[0].map(({ label, score }) => [label, number(score, percent(score))])));
  },
};

function scoreOfOne({ served, target }, { units }, model) {
  const first = served?.result ? [READINGS[model.kind](served, served)] : served?.problem ? [muted(served.problem)] : [];
  if (!target?.result) return first;
  const { result, body } = target;
  const rows = rowsOf(target, units);
  const names = namesOf(model.kind).length ? namesOf(model.kind) : ["Text"];
  const name = valueName(body.target, result);
  return [
    ...(first.length ? first : [headline(shown(result.value), name, sparseSentence(result))]),
    card(`Which words determine the ${name}?`,
      element("div", { className: "heading" }, muted(bestSentence(rows, name)), rowLegend(rows)),
      ...(rows.length === 3 ? [muted("Positive scores speak for the document, negative ones for the other document.")] : []),
      ...passages(rows, names),
      ...faithfulness(result),
      ranking(rows, rows.length > 1 ? names : null)),
    slot(),
    ...alignmentTables(target),
    details("How exact are these numbers?", totals(result, body.target)),
  ];
}

const sparseSentence = ({ value }) => (value > 0
  ? "The entry is active: search finds this text by it."
  : "The entry is not active in this text, so no word has an effect on it.");

function bestSentence(rows, name) {
  const words = rows.flat().filter(({ text }) => text !== null);
  const quoted = (list) => listed(list.slice(0, 3).map(({ content }) => `“${content}”`));
  const raising = words.filter(({ score }) => score > 0).sort((left, right) => right.score - left.score);
  const lowering = words.filter(({ score }) => score < 0).sort((left, right) => left.score - right.score);
  return [raising.length && `${quoted(raising)} raise the ${name} most.`, lowering.length && `${quoted(lowering)} lower it most.`].filter(Boolean).join(" ");
}
