// Tables that a click on a heading sorts.

import { element, exact, raw, shown } from "./dom.js";

// A cell that shows a rounded number, and sorts and exports the exact one.
export const number = (value, text = shown(value)) => ({ value, text });

// Cells are nodes, texts, or objects of `number`.
export function table(caption, heads, rows) {
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell))));
  const headings = heads.map((head) => element("th", { scope: "col", aria: { sort: "none" } },
    element("button", { type: "button", className: "sort" }, head)));
  headings.forEach((heading, column) => heading.firstChild.addEventListener("click", () => sort(body, headings, column)));
  return element("div", { className: "scroll" }, element("table", {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...headings)),
    body));
}

function cell(content) {
  if (content === null || typeof content !== "object" || content instanceof Node) return element("td", {}, content ?? "–");
  return element("td", { className: "number", title: exact(content.value), data: { value: raw(content.value) } }, content.text);
}

// Numbers are sorted from the largest first, texts from A first; a second click reverses.
function sort(body, headings, column) {
  const rows = [...body.rows];
  const numeric = rows.some((row) => row.cells[column].dataset.value !== undefined);
  const first = numeric ? "descending" : "ascending";
  const order = headings[column].ariaSort === first ? (numeric ? "ascending" : "descending") : first;
  for (const heading of headings) heading.ariaSort = "none";
  headings[column].ariaSort = order;
  const sign = order === "ascending" ? 1 : -1;
  body.append(...rows.sort((left, right) => sign * compare(left.cells[column], right.cells[column])));
}

function compare(left, right) {
  const [a, b] = [left, right].map(({ dataset }) => Number(dataset.value));
  if (Number.isFinite(a) && Number.isFinite(b)) return a - b;
  if (Number.isFinite(a) !== Number.isFinite(b)) return Number.isFinite(a) ? 1 : -1;
  return left.textContent.localeCompare(right.textContent, "en");
}
