// Questions with their documents, from JSON Lines or CSV. Wrong lines are named.

import { readCsv } from "./csv.js";

const COLUMNS = ["query", "document", "relevance"];

const isText = (value) => typeof value === "string" && value.trim() !== "";

// Return `questions` with the first line, the documents and the relevance of each, and sentences about wrong lines.
export function parseQuestions(content) {
  const text = content.replace(/^\uFEFF/, "");
  const found = { questions: [], problems: [] };
  (/^\s*[{[]/u.test(text) ? fromJsonLines : fromCsv)(text, found);
  return found;
}

function fromJsonLines(text, { questions, problems }) {
  text.split("\n").forEach((content, index) => {
    if (content.trim() === "") return;
    const line = index + 1;
    const problem = (sentence) => problems.push(`line ${line}: ${sentence}`);
    let parsed;
    try {
      parsed = JSON.parse(content);
    } catch {
      return problem("it is not JSON");
    }
    const { query, documents, expected } = parsed ?? {};
    if (!isText(query)) return problem("“query” must be a text");
    if (!Array.isArray(documents) || !documents.length || !documents.every(isText)) return problem("“documents” must be a list of texts");
    const chosen = [expected].flat();
    const unknown = chosen.find((choice) => !documents.some((document, at) => choice === at || choice === document));
    if (!chosen.length || unknown !== undefined || expected === undefined) {
      return problem("“expected” must be the index of a document from 0, its text, or a list of these");
    }
    questions.push({ line, query, documents, relevance: documents.map((document, at) => Number(chosen.includes(at) || chosen.includes(document))) });
  });
}

function fromCsv(text, { questions, problems }) {
  const { head, rows, wrong } = readCsv(text);
  problems.push(...wrong.map(({ line, sentence }) => `line ${line}: ${sentence}`));
  if (!head) return;
  const columns = COLUMNS.map((name) => head.cells.findIndex((cell) => cell.trim().toLowerCase() === name));
  if (columns.includes(-1)) return problems.push(`line ${head.line}: the header must name the columns ${COLUMNS.join(", ")}`);
  const byQuery = new Map();
  for (const { line, cells } of rows) {
    const [query, document, relevance] = columns.map((column) => cells[column] ?? "");
    if (!isText(query) || !isText(document)) problems.push(`line ${line}: it must have a query and a document`);
    else if (!isText(relevance) || !(Number(relevance) >= 0 && Number(relevance) < Infinity)) problems.push(`line ${line}: the relevance must be 0 or a positive number`);
    else {
      if (!byQuery.has(query)) byQuery.set(query, { line, query, documents: [], relevance: [] });
      byQuery.get(query).documents.push(document);
      byQuery.get(query).relevance.push(Number(relevance));
    }
  }
  for (const question of byQuery.values()) {
    if (question.relevance.every((value) => value === 0)) problems.push(`line ${question.line}: no document of this query has a relevance above 0`);
    else questions.push(question);
  }
}
