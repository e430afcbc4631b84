// A similarity or a score in plain words.

import { element, fixed, shown } from "./dom.js";
import { mean } from "./numbers.js";

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
  [0.65, "very similar"],
  [0.5, "similar"],
  [0.2, "weakly similar"],
  [-Infinity, "no more similar than unrelated texts"],
];

const sum = (a, b, term) => a.reduce((all, value, index) => all + term(value, b[index]), 0);
const dot = (a, b) => sum(a, b, (x, y) => x * y);
export const cosine = (a, b) => dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));

// How vectors are compared, by the similarity that their model declares.
export const SIMILARITIES = {
  cosine,
  dot,
  euclidean: (a, b) => -Math.sqrt(sum(a, b, (x, y) => (x - y) ** 2)),
  manhattan: (a, b) => -sum(a, b, (x, y) => Math.abs(x - y)),
};

// The similarity of text A to unrelated texts on average, and to itself, which is the last of the scores.
export const landmarks = (scores) => ({ unrelated: mean(scores.slice(0, -1)), itself: scores.at(-1) });

const plain = (value) => fixed(value, 2);

// The similarity to itself is below 1 with different prompts of queries and documents.
const partOf = (similarity, { unrelated, itself }) => (similarity - unrelated) / Math.max(itself - unrelated, Number.EPSILON);

const band = (similarity, known) => BANDS.find(([least]) => partOf(similarity, known) >= least)[1];

// Neither the languages of the texts nor those of the model are known here: true of every low similarity.
const LOW = "A low similarity can also mean that the model was not trained for the language of a text. The model's card names its languages.";
const isLow = (similarity, known) => partOf(similarity, known) < 0.5;

// Other similarities than the cosine have no scale: the similarity to itself is not the highest.
export function similarityReading(value, name, known, ...sentences) {
  const isCosine = name.startsWith("cosine");
  return headline(shown(value), name,
    known && isCosine ? `These texts are ${band(value, known)}, for this model.` : "",
    known ? landmarkSentence(known, name) : "",
    known && isCosine && isLow(value, known) ? LOW : "",
    ...sentences, known && isCosine ? scale(value, known.unrelated) : "");
}

export const landmarkSentence = (known, name) =>
  `For this model, text A has a ${name} of ${plain(known.unrelated)} with ${UNRELATED.length} unrelated texts on average, and of ${plain(known.itself)} with itself.`;

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

// The checks of gradients: parity with the served model, completeness, finite numbers.
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
  "Agrees with deletion": "No word that matters has another sign in integrated gradients than left out, and the order of the words is similar.",
};
