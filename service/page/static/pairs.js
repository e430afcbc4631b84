// Contributions of pairs of words to a similarity: linked rows of words, a ranked list and a heat map.

import { diverging } from "./colours.js";
import { card, element, embedded, exact, facts, listed, muted, percent, shown } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { sum } from "./numbers.js";
import { number, table } from "./tables.js";
import { chips, isWord, largest, legend, unitsOf } from "./tokens.js";

const MOST_PAIRS = 12;

// The words of both texts, and their contributions: sums over the tokens of each word.
function pairsOf({ body, result }) {
  const words = (side) => unitsOf(result[`tokens_${side}`], result[`words_${side}`], [body[side].text ?? body[side]], "words");
  const [a, b] = ["a", "b"].map(words);
  const matrix = a.map((left) => b.map((right) =>
    sum(left.tokens.flatMap((i) => right.tokens.map((j) => result.matrix[i][j])))));
  return { a, b, matrix, ranked: rankedPairs(a, b, matrix) };
}

// Pairs of words, the largest contribution first. A word that occurs several times is one word.
function rankedPairs(a, b, matrix) {
  const found = new Map();
  a.forEach((left, i) => b.forEach((right, j) => {
    const name = JSON.stringify([left.content, right.content]);
    if (!found.has(name)) found.set(name, { left, right, value: 0, places: 0 });
    const pair = found.get(name);
    pair.value += matrix[i][j];
    pair.places += 1;
  }));
  return [...found.values()].sort((first, second) => second.value - first.value);
}

// The words with the strongest pairs, and all pairs.
export function pairCards(run, similarity) {
  const pairs = pairsOf(run);
  const scale = largest(pairs.matrix.flat());
  const map = heatmap(pairs.a, pairs.b, pairs.matrix);
  const partners = element("p", { className: "partners muted" }, "Point at a word, or move with the arrow keys, to see its exact number and its partners in the other text.");
  const [first, second] = linkedRows(pairs, map, partners);
  return [
    card("Pairs of words that add up to the similarity of texts A and B",
      muted("The same similarity as a sum over pairs. In the last layer the vector of a word contains its "
        + "neighbours too, and that of a special token the whole text. So pairs are blurred: trust the words above first."),
      element("div", { className: "columns" },
        element("div", {},
          element("h4", {}, "Text A"), first,
          element("h4", {}, "Text B"), second,
          partners),
        pairTable(pairs, run.result.similarity, similarity))),
    element("div", {},
      element("div", { className: "heading" },
        muted(map.sentence), legend(scale)),
      map.node),
  ];
}

// Two rows of chips. A chip in one of them colours the other by their contributions.
function linkedRows({ a, b, matrix }, map, partners) {
  const rows = matrix.map(sum);
  const columns = b.map((_, j) => sum(matrix.map((row) => row[j])));
  const sums = largest([...rows, ...columns]);
  const paintSums = () => {
    inA.paint(rows, sums);
    inB.paint(columns, sums);
  };
  const inA = chips(a, "Words of text A", (i) => {
    map.light(i, null);
    if (i === null) return paintSums();
    inB.paint(matrix[i], largest(matrix[i]));
    partners.textContent = partnerSentence(a[i], b, matrix[i], "B");
  });
  const inB = chips(b, "Words of text B", (j) => {
    map.light(null, j);
    if (j === null) return paintSums();
    const column = matrix.map((row) => row[j]);
    inA.paint(column, largest(column));
    partners.textContent = partnerSentence(b[j], a, column, "A");
  });
  paintSums();
  return [inA.node, inB.node];
}

function partnerSentence(unit, others, values, name) {
  const best = others.map((other, index) => ({ other, value: values[index] })).filter(({ other }) => isWord(other)).sort((left, right) => right.value - left.value).slice(0, 3);
  if (!best.length) return `Text ${name} has no words.`;
  return `“${embedded(unit.content)}” goes best with ${listed(best.map(({ other, value }) => `“${embedded(other.content)}” (${shown(value)})`))} of text ${name}.`;
}

// Pairs with special tokens or punctuation have one row: they are many, and say little.
function pairTable({ ranked }, whole, similarity) {
  const ofWords = ranked.filter(({ left, right }) => isWord(left) && isWord(right));
  const best = ofWords.slice(0, MOST_PAIRS);
  const top = Math.abs(best[0]?.value ?? 0) || 1;
  const bar = (value) => element("span", {
    className: "bar", aria: { hidden: "true" },
    style: { width: `${Math.round((60 * Math.abs(value)) / top)}px`, ...diverging(value, top) },
  });
  const repeats = best.some(({ places }) => places > 1);
  const rows = best.map(({ left, right, value, places }) => [
    left.content, right.content,
    ...(repeats ? [number(places, String(places))] : []),
    { value, text: element("span", { className: "barred" }, shown(value), bar(value)) },
    number(value / whole, percent(value / whole)),
  ]);
  const ranking = table(`Top ${best.length} of ${ofWords.length} pairs of words`, ["Word of A", "Word of B", ...(repeats ? ["Times"] : []), "Contribution", `Of the ${similarity}`], rows);
  const sumOf = (pairs) => sum(pairs.map(({ value }) => value));
  const rest = { "other pairs of words": sumOf(ofWords.slice(MOST_PAIRS)), "with special tokens or punctuation": sumOf(ranked) - sumOf(ofWords) };
  return element("div", { className: "pairs" }, ranking, facts(Object.fromEntries(Object.entries(rest).map(([name, part]) => [name, `${shown(part)}, ${percent(part / whole)}`]))));
}

// How the sum of all pairs becomes the similarity with this name.
export function equation({ sum: ofPairs, similarity, delta, reference_terms: terms }, name) {
  const term = (value, label) =>
    element("span", { className: "term" }, element("strong", { title: exact(value) }, shown(value)), element("small", {}, label));
  return element("div", { className: "equation" },
    term(ofPairs, "sum of pairs"), "+", term(terms.a_baseline, "A × baseline of B"), "+",
    term(terms.baseline_b, "baseline of A × B"), "−", term(terms.baselines, "baseline of A × baseline of B"),
    "=", term(similarity, name),
    element("span", { className: "muted" }, `numerical error ${shown(delta)}`));
}
