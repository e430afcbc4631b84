// A heat map of pairs of words as a table, of the words with the largest contributions.

import { diverging } from "./colours.js";
import { element, embedded, notation, raw } from "./dom.js";
import { orderOf, sum } from "./numbers.js";
import { largest } from "./tokens.js";

// Cells below 40 pixels cannot hold their numbers.
const MOST_WORDS = 20;

// `light(i, j)` marks the row i or the column j; null: none.
export function heatmap(a, b, matrix) {
  const rows = strongest(matrix.map(size));
  const columns = strongest(b.map((_, j) => size(matrix.map((row) => row[j]))));
  const scale = largest(matrix.flat());
  const { show, unit } = notation(scale);
  const cells = rows.map((i) => columns.map((j) => element("td", {
    style: diverging(matrix[i][j], scale),
    title: `${embedded(a[i].content)} × ${embedded(b[j].content)}: ${raw(matrix[i][j])}`,
    data: { value: raw(matrix[i][j]) },
  }, show(matrix[i][j]))));
  const heads = columns.map((j) => element("th", { scope: "col", title: b[j].content }, b[j].content));
  const sides = rows.map((i) => element("th", { scope: "row", title: a[i].content }, a[i].content));
  const light = (row, column) => {
    const [i, j] = [rows.includes(row) ? row : null, columns.includes(column) ? column : null];
    sides.forEach((side, at) => side.classList.toggle("lit", rows[at] === i));
    heads.forEach((head, at) => head.classList.toggle("lit", columns[at] === j));
    cells.forEach((row, at) => row.forEach((cell, across) =>
      cell.classList.toggle("dim", (i !== null && rows[at] !== i) || (j !== null && columns[across] !== j))));
  };
  const grid = element("table", { className: "heatmap" },
    element("caption", {}, `Contribution of each pair${unit && `, in ${unit}`}: words of text A in rows, of text B in columns`),
    element("thead", {}, element("tr", {}, element("td", {}), ...heads)),
    element("tbody", {}, ...sides.map((side, at) => element("tr", {}, side, ...cells[at]))));
  // The sums of a long text need the words that are left out.
  const all = rows.length === a.length && columns.length === b.length;
  const sentence = all
    ? "The numbers add up to the similarity. Warm colours raise it, cold ones lower it."
    : `The ${rows.length} of ${a.length} words of A and ${columns.length} of ${b.length} words of B with the largest contributions.`;
  return { node: element("div", { className: "scroll", tabIndex: 0, role: "region", aria: { label: "Heat map" } }, grid), light, sentence };
}

const size = (values) => sum(values.map(Math.abs));

// Indices of the largest numbers, in the order of the text.
const strongest = (sizes) => orderOf(sizes).slice(0, MOST_WORDS).sort((i, j) => i - j);
