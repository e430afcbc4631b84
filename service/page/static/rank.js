// The ranking of passages by a query: its requests, and the list with the effects of sentences and words.

import { nameOf } from "./deletion.js";
import { details, element, embedded, muted, sentenceCase } from "./dom.js";
import { orderOf } from "./numbers.js";
import { referenceRequest, scoreBody } from "./questions.js";
import { readPassages } from "./rank_passages.js";
import { drawRow, figure, paintRow } from "./rank_row.js";
import { landmarks } from "./reading.js";
import { number, table } from "./tables.js";
import { slice } from "./tokens.js";

// Few passages, so that the first explanations are there soon. Without each of 24 sentences, the tokens are read 24
// times, and a request may read 20,000.
const MAX_EXPLAINED = { passages: 4, tokens: 800 };

const FIELDS = { "/queries": "query", "/documents": "passages" };

// One request scores all passages, so that the ranking costs what /rerank costs.
export function rankRequests({ query, passages }, model) {
  const read = readPassages(passages);
  return [{ key: "ranking", name: "ranking", path: "score", fields: FIELDS, passages: read, body: scoreBody(query, read.map(({ text }) => text), model) }];
}

// Explanations, the best passages first: sentences, or words of passages of one sentence.
export function rankSecondRequests(_inputs, model, runs) {
  const ranking = rankingOf(runs);
  if (!ranking) return [];
  const { query, passages, order } = ranking;
  const explained = grouped(ranking).map((indices) => {
    const first = order.indexOf(indices[0]) + 1;
    const name = `explanation of ranks ${first} to ${first + indices.length - 1} of ${order.length}`;
    const by = (units, some) => ({
      key: "explained", name, path: "score", isSecond: true, isOptional: true, indices: some,
      body: { ...scoreBody(query, some.map((index) => passages[index].text), model), explain: { by: units } },
    });
    const more = ({ explanations }) => {
      const single = indices.filter((_, at) => explanations[at] && isSingle(explanations[at].texts[0]));
      return single.length ? [by("words", single)] : [];
    };
    return { ...by("sentences", indices), more };
  });
  return [...(model.similarity === "cosine" ? [{ ...referenceRequest(query, model), isSecond: true }] : []), ...explained];
}

// Explained again by its words.
const isSingle = ({ by, units }) => by === "sentences" && units.length === 1;

// The indices in order, in groups for a request each.
function grouped({ order, run: { result: { tokens } } }) {
  const groups = [];
  let sum = 0;
  for (const index of order) {
    sum += tokens[index];
    if (sum <= MAX_EXPLAINED.tokens && groups.at(-1)?.length < MAX_EXPLAINED.passages) groups.at(-1).push(index);
    else {
      groups.push([index]);
      sum = tokens[index];
    }
  }
  return groups;
}

// The ranking of the runs, or null: scores by index of the passage, indices in order, and explanations by index.
export function rankingOf(runs) {
  const run = runs.find(({ key, result }) => key === "ranking" && result);
  if (!run) return null;
  const { result, passages, body } = run;
  const explanations = new Map(runs.filter(({ key, result: own }) => key === "explained" && own)
    .flatMap(({ indices, result: { explanations: own } }) => indices.flatMap((index, at) => {
      const explained = own[at] && { ...own[at].texts[0], query: own[at].other };
      return explained && !isSingle(explained) ? [[index, explained]] : [];
    })));
  const reference = runs.find(({ key }) => key === "reference")?.result;
  const { scores, truncated } = result;
  return {
    run, query: body.queries, passages, scores, truncated, explanations, order: orderOf(scores), // equal scores by index, as /rerank has them
    name: nameOf(run), known: reference ? landmarks(reference.scores) : null,
  };
}

// The scale of the bars: of cosines from unrelated texts to the same text, otherwise from the lowest to the highest score.
function scaleOf({ scores, known }) {
  if (known) return [known.unrelated, known.itself, `from unrelated texts (${figure(known.unrelated)}) to the same text (${figure(known.itself)})`];
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  return [low, high, `from the lowest score of the list (${figure(low)}) to the highest (${figure(high)})`];
}

export function drawRanking(runs, inputs, model) {
  const ranking = rankingOf(runs);
  const rows = ranking.order.map((index, place) => drawRow(ranking, index, place, model, inputs.expected === String(index)));
  return element("div", { className: "ranked" },
    element("p", { className: "answer-line" }, answerSentence(ranking)),
    element("div", { className: "why", aria: { live: "polite" } }),
    element("p", { className: "muted bars" }),
    element("ol", { className: "ranking", aria: { label: "Passages by score" } }, ...rows),
    element("div", { className: "slot whatif" }),
    element("section", { className: "second" }));
}

function answerSentence({ scores, order: [first, next], passages, name }) {
  const best = `${sentenceCase(nameOfPassage(passages, first))} is first, with a ${name} of ${figure(scores[first])}`;
  if (next === undefined) return `${best}.`;
  return `${best}: ${figure(scores[first] - scores[next])} more than ${nameOfPassage(passages, next)}, the next.`;
}

// The passage as it is called in sentences: by its id, or its first words.
export function nameOfPassage(passages, index) {
  const { id, text } = passages[index];
  if (id !== null) return `passage ${embedded(id)}`;
  const words = text.trim().split(/\s+/u);
  const start = slice(words.slice(0, 6).join(" "), { start: 0, end: 50 });
  return `“${embedded(start)}${start === words.join(" ") ? "" : " …"}”`;
}

// Called after each explanation: the rows stay, with their focus and edits, and are coloured.
export function drawRankingSecond(runs, model, isPending) {
  const ranking = rankingOf(runs);
  const scale = scaleOf(ranking);
  const list = document.querySelector("#rank .ranking");
  // That of the chunks is in the comparison with the first passage.
  const problems = runs.flatMap(({ key, problem }) => (problem && key !== "chunks" ? [muted(problem)] : []));
  list.parentNode.querySelector(".bars").textContent = `Bars: ${scale[2]}. Orange raises the score, blue lowers it: measured without each sentence, or word of a single sentence, on a scale per passage.`;
  for (const row of list.children) paintRow(row, ranking, scale, model, isPending);
  list.dispatchEvent(new Event("painted", { bubbles: true }));
  const numbers = details("Exact numbers", effects(ranking), scores(ranking));
  numbers.open = list.parentNode.querySelector(".second details")?.open ?? false;
  return [...problems, numbers];
}

function effects({ passages, explanations, order, name }) {
  const rows = order.flatMap((index, place) => (explanations.get(index)?.units ?? []).map((unit) =>
    [number(place + 1, String(place + 1)), slice(passages[index].text, unit), ...[unit.left_out, unit.alone].map((value) => (value === null ? "not measured" : number(value)))]));
  return table(`Effect of each sentence or word on the ${name}`, ["Rank of the passage", "Sentence or word", "Left out", "Alone"], rows);
}

function scores({ passages, scores: values, order, name }) {
  return table("Passages by score", ["Rank", name, "Id", "Passage"],
    order.map((index, place) => [number(place + 1, String(place + 1)), number(values[index]), passages[index].id, passages[index].text]));
}
