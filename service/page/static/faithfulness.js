// Whether scores agree with deletion: in sign and order, and of the words with the highest scores.

import { details, element, mark, muted, percent, shown, signed } from "./dom.js";
import { number, table } from "./tables.js";

// Lowest rank correlation of scores that order the words as deletion does.
const SIMILAR_ORDER = 0.7;

// True, false, or null without a correlation; `opposite` are words that matter whose signs differ.
export function agrees({ rank_correlation: order, opposite_signs: share }, opposite = []) {
  if (opposite.length || share > 0) return false;
  return Number.isFinite(order) ? order >= SIMILAR_ORDER : null;
}

const VERDICTS = {
  2: [true, "The words with the highest scores matter more than random ones, in both tests."],
  1: [null, "The words with the highest scores matter more than random ones in one test of two."],
  0: [false, "The words with the highest scores matter no more than random ones."],
  NaN: [null, "The words with the highest scores could not be compared with random ones: without them, no tokens or no finite numbers are left."],
};

export function faithfulness({ faithfulness: measured }, ofText = "", opposite = []) {
  if (!measured) return [];
  const { units, points, comprehensiveness, sufficiency, random, rank_correlation: order, opposite_signs: share } = measured;
  const isMeasured = [comprehensiveness, sufficiency, random.comprehensiveness, random.sufficiency].every(Number.isFinite);
  const wins = isMeasured ? (comprehensiveness > random.comprehensiveness) + (sufficiency < random.sufficiency) : NaN;
  const [passes, verdict] = VERDICTS[wins];
  return [element("div", { className: "faithfulness" },
    ...(Number.isFinite(order) ? [element("p", {}, element("strong", {}, `Scores${ofText}: `),
      mark(agrees(measured, opposite), ["they agree with deletion", "they do not agree with deletion", ""]),
      `. Their rank correlation with deletion is ${shown(order, 2)}${Number.isFinite(share) ? `, and ${percent(share)} of the ${units} that matter have the opposite sign` : ""}.`)] : []),
    details(`How the scores${ofText} were measured`,
      element("p", {}, mark(passes, [verdict, verdict, verdict])),
      table("Mean fall of the value; good: large if removed, small if kept", ["Test", "Highest scores", "Random words"], [
        [`${units} removed`, number(comprehensiveness), number(random.comprehensiveness)],
        [`only these ${units} kept`, number(sufficiency), number(random.sufficiency)],
      ]),
      muted("The reference model runs on the text without the words, and on these words alone. "
        + "The table above has the means over the shares below. “Random” is the mean of five random orders of the words."),
      table("Fall of the value, by share of the text", ["Share", `Removed or kept ${units}`, "Without them", "With them alone"],
        points.map((point) => [number(point.share, percent(point.share)), number(point.count, String(point.count)),
          number(point.comprehensiveness, signed(point.comprehensiveness)), number(point.sufficiency, signed(point.sufficiency))]))))];
}
