// A row of the ranking: rank, score, and the passage as prose, coloured by what its sentences or words do to the score.

import { diverging } from "./colours.js";
import { isCut, roundingOf, unknownSentence } from "./deletion.js";
import { element, embedded } from "./dom.js";
import { rove } from "./roving.js";
import { beginning, largest, slice } from "./tokens.js";

const DECIMALS = 4;

// A score or a difference; what rounds to zero has no sign.
export function figure(value, withSign = false) {
  const digits = Math.abs(value) >= 100 ? 1 : DECIMALS;
  const shown = value.toFixed(digits);
  if (Number(shown) === 0) return (0).toFixed(digits);
  return `${withSign && value > 0 ? "+" : ""}${shown.replace("-", "−")}`;
}

const button = (action, label, properties = {}) =>
  element("button", { type: "button", className: "quiet", data: { action }, ...properties }, label);

export function drawRow({ passages, scores }, index, place, model, isExpected) {
  const { text, id } = passages[index];
  return element("li", { className: `row${isExpected ? " expected" : ""}`, data: { index } },
    element("div", { className: "place" },
      element("strong", { className: "rank" }, String(place + 1)),
      element("span", { className: "score", data: { score: scores[index] } }, figure(scores[index])),
      element("span", { className: "level", aria: { hidden: "true" } }, element("span")),
      element("span", { className: "after" }),
      ...(id === null ? [] : [element("span", { className: "id muted" }, id)]),
      ...(isExpected ? [element("span", { className: "wish" }, "should be first")] : []),
      element("span", { className: "slot actions" },
        button(isExpected ? "unexpect" : "expect", isExpected ? "Need not be first" : "Should be first"),
        button("edit", "Edit", { ariaExpanded: "false" }),
        button("undo", "Undo", { hidden: true }),
        button("explain", "Explain in detail"))),
    element("div", { className: "prose", dir: "auto", role: "group", aria: { label: `Passage of rank ${place + 1}` } }, beginning(text)),
    element("p", { className: "readout muted" }),
    element("label", { className: "slot editor", hidden: true },
      element("span", { className: "name" }, `Passage of rank ${place + 1}, edited`),
      element("textarea", { rows: 4, dir: "auto" })));
}

// Colour a row: once its explanation is there, its units can be struck out.
export function paintRow(row, ranking, [low, high], model, isPending) {
  const index = Number(row.dataset.index);
  const share = (ranking.scores[index] - low) / (high - low || 1);
  row.querySelector(".level > span").style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  const explained = ranking.explanations.get(index);
  if (explained && !row.dataset.by) paintProse(row, explained, ranking, index, model);
  const readout = row.querySelector(".readout");
  if (!explained && !isPending) readout.textContent = `Not explained.${ranking.truncated[index] ? " The model did not read all of it." : ""}`;
}

function paintProse(row, explained, { passages, truncated, query }, index, model) {
  const { text } = passages[index];
  const isTruncated = truncated[index];
  row.dataset.by = explained.by;
  const prose = row.querySelector(".prose");
  const scale = Math.max(roundingOf([explained]), largest(explained.units.map(({ left_out: value }) => value)));
  let at = explained.start;
  const content = explained.units.flatMap((unit) => {
    const between = slice(text, { start: at, end: unit.start });
    at = unit.end;
    return [between, unitOf(unit, slice(text, unit), scale, isTruncated)];
  });
  const units = content.filter((part) => part instanceof Node);
  const endsEarly = isTruncated && explained.end < [...text].length;
  prose.replaceChildren(
    ...(explained.start > 0 ? [unread(slice(text, { start: 0, end: explained.start })), cutLine(model, "from here")] : []), ...content, slice(text, { start: at, end: explained.end }),
    ...(endsEarly ? [cutLine(model, "up to here"), unread(slice(text, { start: explained.end }))] : []));
  prose.ariaLabel = `${prose.ariaLabel}: its ${explained.by} can be struck out`;
  rove(prose, units);
  const readout = row.querySelector(".readout");
  const queried = { ...explained.query, content: query, name: "Query" };
  readout.textContent = [
    isCut(queried) ? "The model did not read all of the query." : "",
    unknownSentence([queried, { ...explained, content: text, name: "Passage" }]),
  ].filter(Boolean).join(" ");
  const say = ({ target }) => { if (target.dataset.said) readout.textContent = target.dataset.said; };
  prose.addEventListener("focusin", say);
  prose.addEventListener("mouseover", say);
}

function unitOf(unit, content, scale, isTruncated) {
  const { left_out: value } = unit;
  const said = value === null ? "Its effect was not measured." : `Without ${/\s/u.test(content) ? "this sentence" : `“${embedded(content)}”`}, the score${isTruncated ? " of the part that the model reads" : ""} changes by ${figure(-value, true)}. Enter strikes it out.`;
  return element("span", {
    className: "unit", role: "button", tabIndex: 0, style: value === null ? {} : diverging(value, scale),
    aria: { pressed: "false" }, data: { action: "strike", said, score: value ?? "" },
  }, content);
}

const unread = (content) => element("span", { className: "unread" }, beginning(content));

// Where the part that the model reads begins or ends, which has its maximum length.
function cutLine({ kind, info }, place) {
  const tokens = info.max_tokens_by_prompt.document ?? info.limits.max_tokens;
  return element("span", { className: "cut" }, `the model read ${place}: ${tokens} tokens${kind === "reranker" ? " with the query" : ""}`);
}
