// What edits change in a ranking: the new score and rank of each passage, and sentences about them.

import { quoted } from "./deletion.js";
import { sentenceCase } from "./dom.js";
import { nameOfPassage } from "./rank.js";
import { figure } from "./rank_row.js";
import { slice } from "./tokens.js";

// The change of each passage, in the order before the edits; none if `after`, the scores with the edits, is null.
export const changesOf = (ranking, after) => ranking.order.map((index, place) => {
  const isMeasured = after?.indices.includes(index);
  const rank = after ? after.order.indexOf(index) + 1 : place + 1;
  const words = isMeasured ? `now ${figure(after.scores[index])}, rank ${rank}${chunkOf(ranking, after, index)}` : rank !== place + 1 ? `now rank ${rank}` : "";
  return { index, place, rank, words };
});

// Each edited passage, or what becomes of the list.
export function saidOf(ranking, { concernsAll, order: [first], scores, texts }, changes) {
  const moved = changes.filter(({ place, rank }) => rank !== place + 1).length;
  const edited = changes.filter(({ index }) => texts.has(index)).map(({ index, place, words }) =>
    `${sentenceCase(nameOfPassage(ranking.passages, index))}: ${words}; before ${figure(ranking.scores[index])}, rank ${place + 1}.`);
  if (!concernsAll) return edited;
  return [`${sentenceCase(nameOfPassage(ranking.passages, first))} is first, with ${figure(scores[first])}. ${moved} of ${changes.length} passages change their rank.`, ...edited];
}

function chunkOf({ passages }, { chunks, indices, texts }, index) {
  const chunk = chunks?.[indices.indexOf(index)];
  return chunk ? `, best chunk ${quoted({ content: slice(texts.get(index) ?? passages[index].text, chunk) })}` : "";
}
