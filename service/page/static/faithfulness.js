// Whether the scores find the words that matter: removing them, and keeping only them.

import { details, element, mark, percent, shown, signed } from "./dom.js";
import { number, table } from "./tables.js";

const VERDICTS = {
  2: [true, "The named words matter more than random ones, in both tests."],
  1: [null, "The named words matter more than random ones in one test of two: take the scores with care."],
  0: [false, "The named words matter no more than random ones: do not rely on the scores."],
};

export function faithfulness({ faithfulness: measured }, ofText = "") {
  if (!measured) return [];
  const { units, points, comprehensiveness, sufficiency, random } = measured;
  const wins = (comprehensiveness > random.comprehensiveness) + (sufficiency < random.sufficiency);
  const [passes, verdict] = VERDICTS[wins];
  return [element("div", { className: "faithfulness" },
    element("p", {}, element("strong", {}, `Faithfulness${ofText}: `), mark(passes, [verdict, verdict, verdict])),
    table("Mean fall of the value; good: large if removed, small if kept", ["Test", "Highest scores", "Random words"], [
      [`${units} removed`, number(comprehensiveness), number(random.comprehensiveness)],
      [`only these ${units} kept`, number(sufficiency), number(random.sufficiency)],
    ]),
    details("How it was measured",
      element("p", { className: "muted" }, "The model runs on the text without the words, and on these words alone. "
        + "The table above has the means over the shares below. “Random” is the mean of five random orders of the words."),
      table("Fall of the value, by share of the text", ["Share", `Removed or kept ${units}`, "Without them", "With them alone"],
        points.map((point) => [number(point.share, percent(point.share)), number(point.count, String(point.count)),
          number(point.comprehensiveness, signed(point.comprehensiveness)), number(point.sufficiency, signed(point.sufficiency))]))))];
}
