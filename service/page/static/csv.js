// CSV by RFC 4180: a header and rows, and sentences about wrong lines.

import { count } from "./dom.js";

// A cell and what ends it. A quoted cell can have commas, line breaks and doubled quotes.
const CELL = /(?:"((?:[^"]|"")*)"|([^",\r\n][^,\r\n]*)?)(,|\r?\n|$)/gy;

// The header and the rows, each with its cells and the line where it starts, and what is wrong with others.
export function readCsv(text) {
  const { records: [head, ...rows], broken } = recordsOf(text);
  const isRight = ({ cells }) => cells.length === head.cells.length;
  return {
    head, rows: rows.filter(isRight),
    wrong: [
      ...rows.filter((row) => !isRight(row)).map(({ line, cells }) => ({ line, sentence: `${count(cells.length, "cell")}, and the header has ${head.cells.length}` })),
      ...(broken ? [{ line: broken, sentence: "a quote is not closed, or a quoted cell does not end with it" }] : []),
    ],
  };
}

// The records with the line where each starts, and the line where the text is no CSV.
function recordsOf(text) {
  const records = [];
  let [cells, line, next, read] = [[], 1, 1, 0];
  for (const { 0: cell, 1: quoted, 2: plain = "", 3: end, index } of text.matchAll(CELL)) {
    cells.push(quoted?.replaceAll('""', '"') ?? plain);
    next += cell.split("\n").length - 1;
    read = index + cell.length;
    if (end === ",") continue;
    if (cells.length > 1 || cells[0].trim()) records.push({ line, cells });
    [cells, line] = [[], next];
  }
  return { records, broken: read < text.length ? next : null };
}
