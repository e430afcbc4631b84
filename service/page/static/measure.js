// Results of the served model for texts before and after an edit.

import { embedded } from "./dom.js";
import { classifyBody, scoreBody } from "./questions.js";
import { ask } from "./request.js";

// Return rows of a name, and the result before and after.
export function measure(before, after, model, name, key, signal) {
  const post = (path, body) => ask(path, body, key, signal);
  return model.kind === "classifier" ? labels(before, after, name, post) : scores(before, after, model, name, post);
}

const MOST_LABELS = 5;

// The best labels, and the explained one.
async function labels(before, after, explained, post) {
  const [first, second] = await Promise.all([before, after].map(async (texts) => (await post("classify", classifyBody(texts))).labels[0]));
  const later = Map.groupBy(second, ({ label }) => label); // several labels can have one name
  const rows = first.map(({ label, score }) => ({ name: `score of ${embedded(label)}`, before: score, after: later.get(label).shift().score }));
  return [
    { name: "predicted label", before: embedded(first[0].label), after: embedded(second[0].label) },
    ...rows.filter(({ name }, index) => index < MOST_LABELS || name === explained),
  ];
}

const place = ([score, other]) => (score === other ? "1st, with the other" : score > other ? "1st of 2" : "2nd of 2");

async function scores(before, after, model, name, post) {
  const [first, second] = await Promise.all([before, after].map(async ({ a, b, c }) =>
    (await post("score", scoreBody(a, c ? [b, c] : [b], model))).scores));
  const rows = [{ name, before: first[0], after: second[0] }];
  if (first.length === 1) return rows;
  return [...rows,
    { name: `${name} of ${model.kind === "embedding" ? "text C" : "the other document"}`, before: first[1], after: second[1] },
    { name: `rank of ${model.kind === "embedding" ? "text B" : "the document"}`, before: place(first), after: place(second) }];
}
