// Whether the scores find the words that matter: removing them, and keeping only them.

import { details, element, mark, percent, shown, signed } from "./dom.js";
import { number, table } from "./tables.js";

const VERDICTS = {
  2: [true, "The scores find the words that matter: better than random in both tests."],
  1: [null, "The scores beat random words in one test of two: take them with care."],
  0: [false, "The scores are no better than random words: do not rely on them."],
};

export function faithfulness({ faithfulness: measured }, ofText = "") {
  if (!measured) return [];
  const { units, points, comprehensiveness, sufficiency, random } = measured;
  const wins = (comprehensiveness > random.comprehensiveness) + (sufficiency < random.sufficiency);
  const [passes, verdict] = VERDICTS[wins];
  return [element("div", { className: "faithfulness" },
    element("p", {}, element("strong", {}, `Faithfulness${ofText}: `), mark(passes, [verdict, verdict, verdict])),
    element("p", {}, `Without the ${units} of the highest scores, the value falls by ${shown(comprehensiveness)}; `
      + `without as many random ones, by ${shown(random.comprehensiveness)}. `
      + `With those ${units} alone, it falls by ${shown(sufficiency)}; with random ones alone, by ${shown(random.sufficiency)}.`),
    details("How it was measured",
      element("p", { className: "muted" }, "The model runs on the text without the words, and on these words alone. "
        + "The sentence above has the means over the shares below. “Random” are the means of random orders of the words."),
      table("Fall of the value, by share of the text", ["Share", `Removed or kept ${units}`, "Without them", "With them alone"],
        points.map((point) => [number(point.share, percent(point.share)), number(point.count, String(point.count)),
          number(point.comprehensiveness, signed(point.comprehensiveness)), number(point.sufficiency, signed(point.sufficiency))]))))];
}
