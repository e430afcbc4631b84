// The first view: why a model gave its result, in sentences and pictures, by kind of model.

import { element, embedded, muted, percent, sentenceCase, shown, signed } from "./dom.js";
import { deletionCard, inSentence, nameOf, textNames } from "./deletion.js";
import { headline, landmarks, landmarkSentence, similarityReading } from "./reading.js";
import { number, table } from "./tables.js";

export function drawExplanation(runs, inputs, model) {
  const [deletion, reference] = ["deletion", "reference"].map((name) => runs.find(({ key }) => key === name));
  const [explained, other] = deletion.result.explanations;
  return element("div", { className: "explanation" },
    other ? differenceReading(deletion, reference, model.kind) : READINGS[model.kind](deletion, reference, model.info),
    ...(reference?.problem ? [muted(reference.problem)] : []),
    ...(explained ? [deletionCard(deletion, model), element("section", { className: "second", aria: { live: "polite" } })]
      : [muted(`The tokens of a request do not suffice to explain ${inSentence(textNames(model.kind)[1])}: shorten it, or explain by sentences.`)]));
}

// Two documents have one question: which of them the model prefers, and why.
function differenceReading(run, reference, kind) {
  const [score, other] = run.result.scores;
  const [, name, below] = textNames(kind);
  return headline(signed(score - other), `difference in ${nameOf(run)}`,
    placeOf(run, sentenceCase(inSentence(name)), inSentence(below)),
    `The ${nameOf(run)} of ${inSentence(name)} is ${shown(score)}.`,
    reference?.result ? landmarkSentence(landmarks(reference.result.scores), nameOf(run)) : "");
}

// Where the document ranks, if there are two.
const placeOf = ({ result: { scores: [score, other] } }, name = "The document", below = "the other document") =>
  (other === undefined ? "" : `${name} ranks ${score === other ? "beside" : score > other ? "above" : "below"} ${below}, whose score is ${shown(other)}.`);

const READINGS = {
  embedding: (run, reference) => similarityReading(run.result.scores[0], nameOf(run),
    reference?.result ? landmarks(reference.result.scores) : null, placeOf(run, "Text B", "text C")),
  reranker: (run, _reference, { activation }) => headline(shown(run.result.scores[0]), nameOf(run),
    activation === "sigmoid" ? `A logit of ${shown(run.result.scores[0])} is a relevance of ${percent(1 / (1 + Math.exp(-run.result.scores[0])))}.` : "", placeOf(run)),
  sparse: (run) => headline(shown(run.result.scores[0]), nameOf(run),
    "Query and document have a weight for each entry of the vocabulary; the score is the sum of the products.", placeOf(run)),
  multi: (run) => headline(shown(run.result.scores[0]), nameOf(run),
    "Each query token is matched with its most similar document token; MaxSim is the sum.", placeOf(run)),
  classifier: ({ result: { labels: [labels], explanations: [{ label }] } }, _reference, { activation }) => {
    const [best, next] = labels;
    const written = activation === "identity" ? shown : percent;
    return headline(embedded(best.label), `with a score of ${written(best.score)}`,
      next ? `The next label is ${embedded(next.label)}, with ${written(next.score)}.` : "",
      label === best.label ? "" : `The words below are of the score of ${embedded(label)}.`,
      table("Labels", ["Label", "Score"], labels.map(({ label: name, score }) => [name, number(score, written(score))])));
  },
};
