// Metrics of rankings, as means over questions. The relevance of a document is 0 or more; those above 0 are expected.

import { mean, sum } from "./numbers.js";

const NDCG_DEPTH = 10;

// Indices of the documents, the best first. Equal scores count against the expected documents: a model that gives all
// documents one score has found nothing.
const order = (scores, relevance) =>
  scores.map((_, index) => index).sort((i, j) => scores[j] - scores[i] || relevance[i] - relevance[j]);

// Discounted cumulative gain with linear gains, by Järvelin and Kekäläinen as in trec_eval.
const gain = (relevance) =>
  sum(relevance.slice(0, NDCG_DEPTH).map((value, index) => value / Math.log2(index + 2)));

// The ranking of one question: `places` has the indices, `rank` is that of the best expected document, and `margin` its score less the best score
// of a document that is not expected, which is missing if all are.
export function judgedRanking(scores, relevance) {
  const places = order(scores, relevance);
  const place = places.findIndex((index) => relevance[index] > 0);
  const expected = places[place];
  const rival = places.find((index) => relevance[index] === 0);
  return {
    places, rank: place + 1, expected, rival,
    margin: rival === undefined ? null : scores[expected] - scores[rival],
    ndcg: gain(places.map((index) => relevance[index])) / gain([...relevance].sort((a, b) => b - a)),
  };
}

export const hits = (rankings, k) => mean(rankings.map(({ rank }) => Number(rank <= k)));
export const meanReciprocalRank = (rankings) => mean(rankings.map(({ rank }) => 1 / rank));
export const meanNdcg = (rankings) => mean(rankings.map(({ ndcg }) => ndcg));
