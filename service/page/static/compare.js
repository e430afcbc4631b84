// Two models on the same texts: their neighbours, and how similar their layers are.

import { chart } from "./charts.js";
import { colour } from "./colours.js";
import { card, element, muted, shown, signed } from "./dom.js";
import { mean, orderOf } from "./numbers.js";
import { cosine, SIMILARITIES } from "./reading.js";
import { parseSafetensors } from "./safetensors.js";
import { number, table } from "./tables.js";

export function drawComparison(runs, inputs, model, models) {
  const find = (key) => runs.find((run) => run.key === key);
  const [first, second] = [0, 1].map((index) => find(`vectors${index}`)?.result?.embeddings);
  if (!first || !second) return [];
  const names = [model.name, find("vectors1").body.model];
  const texts = find("vectors0").body.inputs;
  const similarityOf = (name) => models.find((served) => served.name === name)?.similarity;
  const [left, right] = [first, second].map((vectors, index) => similarities(vectors, similarityOf(names[index])));
  const problems = runs.filter(({ problem }) => problem).map(({ problem }) => muted(problem));
  return [
    neighbours(texts, left, right, names),
    pairChanges(texts, left, right, names),
    ...layers(find("activations0"), find("activations1"), names),
    ...problems,
  ];
}

// Each model compares its vectors by the similarity that it declares.
function similarities(vectors, similarity) {
  const compare = SIMILARITIES[similarity] ?? SIMILARITIES.cosine;
  return vectors.map((a) => vectors.map((b) => compare(a, b)));
}

function neighbours(texts, left, right, names) {
  const rows = texts.map((text, index) => {
    const [before, after] = [left, right].map((own) => orderOf(own[index]).filter((other) => other !== index));
    return { text, before, after, same: before[0] === after[0] };
  });
  const changed = rows.filter(({ same }) => !same).length;
  return card("Which neighbours change?",
    element("p", {}, changed
      ? `${changed} of ${texts.length} texts have another nearest neighbour in ${names[1]}.`
      : `All ${texts.length} texts have the same nearest neighbour in both models.`),
    table("Nearest neighbour of each text", ["Text", names[0], names[1], "Neighbour"],
      rows.map(({ text, before, after, same }) => [text, texts[before[0]] ?? "–", texts[after[0]] ?? "–", same ? "the same" : "changed"])));
}

function pairChanges(texts, left, right, names) {
  const pairs = texts.flatMap((_, i) => texts.slice(i + 1).map((_, offset) => [i, i + 1 + offset]));
  const rows = pairs.map(([i, j]) => ({ i, j, difference: right[i][j] - left[i][j] })).sort((a, b) => Math.abs(b.difference) - Math.abs(a.difference)).slice(0, 12);
  return card("Which similarities change most?",
    table(`Top ${rows.length} of ${pairs.length} pairs`, ["Text", "Other text", names[0], names[1], "Difference"],
      rows.map(({ i, j, difference }) => [texts[i], texts[j], number(left[i][j]), number(right[i][j]), number(difference, signed(difference))])));
}

// The same layer of two versions of a model is compared text by text; the mean of its token vectors.
function layers(first, second, names) {
  if (!first?.result || !second?.result) return [];
  const [a, b] = [first, second].map(({ result }) => parseSafetensors(result).tensors);
  const taps = first.body.taps.filter((tap) => a[`0/${tap}`] && b[`0/${tap}`]?.shape.join() === a[`0/${tap}`].shape.join());
  if (!taps.length) return [card("Where do the layers differ?", muted("The models have no layers of the same name and width, so their layers cannot be compared."))];
  const rows = taps.map((tap) => {
    const values = first.body.texts.map((_, index) => cosine(a[`${index}/${tap}`].values, b[`${index}/${tap}`].values));
    return { tap, mean: mean(values), lowest: Math.min(...values) };
  });
  const start = rows.find(({ lowest }) => lowest < 0.999);
  return [card("Where do the layers differ?",
    element("p", {}, start
      ? `The first layer with another result is ${start.tap}: the lowest cosine of a text's mean token vector is ${shown(start.lowest)} there.`
      : "All layers have the same results, to three decimals."),
    layerChart(rows),
    table(`Cosine of the mean token vectors of ${names.join(" and ")}`, ["Layer", "Mean over texts", "Lowest"],
      rows.map(({ tap, mean: middle, lowest }) => [tap, number(middle), number(lowest)])))];
}

function layerChart(rows) {
  const trace = (name, pick, tone, symbol) => ({
    name, x: rows.map(({ tap }) => tap), y: rows.map(pick), mode: "lines+markers",
    line: { color: colour(tone), width: 2 }, marker: { size: 7, symbol },
  });
  return chart("Cosine of the mean token vectors of both models, by layer", 260,
    [trace("mean over texts", (row) => row.mean, "accent", "circle"), trace("lowest", ({ lowest }) => lowest, "high", "square")],
    { xaxis: { type: "category", tickangle: -45 }, yaxis: { nticks: 5, range: [Math.min(...rows.map(({ lowest }) => lowest)) - 0.05, 1.05] }, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" } });
}

