// A similarity or a score in plain words.

import { element, shown } from "./dom.js";

// Texts that hardly any text is about. How similar they are to text A is a measure for the model.
export const UNRELATED = [
  "The invoice is due at the end of the month.",
  "Photosynthesis turns light into sugar.",
  "The committee will vote on Tuesday.",
  "Compile the program with debug symbols.",
  "Add salt and simmer for ten minutes.",
];

// Lower ends, as parts of the way from unrelated texts to the same text.
const BANDS = [
  [0.85, "nearly the same"],
  [0.6, "very similar"],
  [0.35, "similar"],
  [0.15, "loosely related"],
  [-Infinity, "no more similar than unrelated texts"],
];

const sum = (a, b, term) => a.reduce((all, value, index) => all + term(value, b[index]), 0);
const dot = (a, b) => sum(a, b, (x, y) => x * y);
export const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));

// The similarities that a model can declare, with a name to follow "a", of two served vectors.
export const SIMILARITIES = {
  cosine: { name: "cosine", compare: cosine },
  dot: { name: "dot product", compare: dot },
  euclidean: { name: "negative Euclidean distance", compare: (a, b) => -Math.sqrt(sum(a, b, (x, y) => (x - y) ** 2)) },
  manhattan: { name: "negative Manhattan distance", compare: (a, b) => -sum(a, b, (x, y) => Math.abs(x - y)) },
};

// The similarity of text A to unrelated texts on average, and to itself. The first vector is text
// A's, the second text B's, then those of UNRELATED.
export function landmarks([a, , ...others], { compare }) {
  return { unrelated: others.reduce((all, vector) => all + compare(a, vector), 0) / others.length, itself: compare(a, a) };
}

const plain = (value) => value.toFixed(2).replace("-", "−");

export function band(similarity, unrelated) {
  const part = (similarity - unrelated) / (1 - unrelated);
  return BANDS.find(([least]) => part >= least)[1];
}

// Other similarities than the cosine have no scale: the similarity to itself is not the highest.
export function similarityReading(value, similarity, known, sentence) {
  const isCosine = similarity === SIMILARITIES.cosine;
  return headline(shown(value), isCosine ? "cosine similarity" : similarity.name,
    known && isCosine ? `These texts are ${band(value, known.unrelated)}, for this model.` : "",
    known ? `For this model, text A has a ${similarity.name} of ${plain(known.unrelated)} with ${UNRELATED.length} unrelated texts on average, and of ${isCosine ? 1 : plain(known.itself)} with itself.` : "",
    sentence, known && isCosine ? scale(value, known.unrelated) : "");
}

// A line from −1 to 1 with the similarity and that of unrelated texts.
function scale(similarity, unrelated) {
  const tick = (value, name, className) => element("span", {
    className: `tick ${className}`, style: { left: `${50 + 50 * Math.max(-1, Math.min(1, value))}%` },
  }, element("small", {}, name));
  return element("div", { className: "scale", role: "img", aria: { label: `${shown(similarity)} on a scale from −1 to 1; unrelated texts: ${plain(unrelated)}` } },
    tick(-1, "−1", "start"), tick(unrelated, "unrelated", "below"), tick(similarity, "A and B", "here"), tick(1, "1: same", "end"));
}

export function headline(figure, name, ...content) {
  return element("section", { className: "answer" },
    element("p", { className: "figure" }, element("strong", {}, figure), " ", element("span", { className: "muted" }, name)),
    element("div", { className: "reading" }, ...content.filter(Boolean).map((part) => (part instanceof Node ? part : element("p", {}, part)))));
}

// The checks of the latest results: parity with the served model, completeness, finite numbers.
export function checks(results, kind) {
  const parities = results.flatMap(({ parity }) => parity ?? []);
  const integrals = results.flatMap(({ completeness }) => completeness ?? []);
  const finite = results.every(({ nonfinite }) => !nonfinite?.length);
  const converged = integrals.every((integral) => integral.converged);
  return [
    ["Same result", parities.length ? parities.every(({ agrees }) => agrees) : null, parities.length ? paritySentence(parities, kind) : ""],
    ["Sum", integrals.length ? converged : null, integrals.length ? (converged ? "baseline and scores add up to the result" : "the scores do not add up yet: more evaluations are needed") : ""],
    ["Finite", finite ? null : false, "some numbers are NaN or ∞"],
  ];
}

function paritySentence(parities, kind) {
  if (["embedding", "multi"].includes(kind)) return `as the served model, within ${shown(Math.max(0, ...parities.map(({ cosine: value }) => 1 - value)))}`;
  return `as the served model, within ${shown(Math.max(...parities.map(({ max_abs: difference }) => difference)))}`;
}

// What the checks mean.
export const CHECKS = {
  "Same result": "The explained reference model has the vectors, or logits, of the served model.",
  Sum: "The result of the baseline (a text of padding, if not chosen) and the scores add up to the result, within the tolerance.",
  Finite: "No number is NaN or infinite.",
};

