// The passages of a ranking as text: paragraphs, JSON Lines or CSV, chosen by the first line.

import { readCsv } from "./csv.js";
import { listed } from "./dom.js";
import { Problem } from "./request.js";

export const MAX_PASSAGES = 50;
const FIELDS = ["text", "passage", "document", "content"];
const BLANK_LINES = /\n[^\S\n]*\n\s*/u;

const problem = (message) => new Problem(message, { field: "passages" });

// Return the passages of a text, each with its `text`, and its `id` or null.
export function readPassages(text) {
  const first = text.trimStart().split("\n")[0];
  const passages = isJson(first) ? readJsonLines(text) : isHeader(text) ? readRows(text) : readParagraphs(text);
  if (!passages.length) throw problem("write at least one passage");
  if (passages.length > MAX_PASSAGES) throw problem(`${passages.length} passages; the limit of this view is ${MAX_PASSAGES}`);
  return passages;
}

// Write passages as a text that `readPassages` reads: paragraphs, or JSON Lines if they cannot be paragraphs.
export function writePassages(passages) {
  const paragraphs = passages.map(({ text }) => text).join("\n\n");
  const isSame = passages.every(({ id }) => id === null) && !isJson(paragraphs.split("\n")[0]) && !isHeader(paragraphs)
    && readParagraphs(paragraphs).map(({ text }) => text).join("\0") === passages.map(({ text }) => text).join("\0");
  return isSame ? paragraphs : passages.map(({ text, id }) => JSON.stringify(id === null ? text : { id, text })).join("\n");
}

const readParagraphs = (text) => text.trim().split(BLANK_LINES).filter(Boolean).map((paragraph) => ({ text: paragraph, id: null }));

// A paragraph can begin with a quotation, so that a line of it must be JSON as a whole.
function isJson(line) {
  if (/^\{\s*"/.test(line)) return true;
  try {
    return typeof JSON.parse(line) === "string";
  } catch {
    return false;
  }
}

// JSON whose ids are texts: numbers of 17 digits and more would be rounded. Older browsers give no source of a number.
const parsed = (json) => JSON.parse(json, (name, value, context) => (name === "id" && typeof value === "number" ? (context?.source ?? value) : value));

function readJsonLines(text) {
  return text.split("\n").flatMap((line, index) => {
    if (!line.trim()) return [];
    const place = `line ${index + 1} of the passages`;
    let value;
    try {
      value = parsed(line);
    } catch {
      throw problem(`${place} is not JSON`);
    }
    const own = typeof value === "string" ? value : value?.[FIELDS.find((field) => typeof value?.[field] === "string")];
    if (own === undefined) throw problem(`${place} is neither a text nor an object with one of the fields ${FIELDS.join(", ")}`);
    return [{ text: own, id: idOf(value.id) }];
  });
}

const idOf = (id) => (["string", "number"].includes(typeof id) && id !== "" ? String(id) : null);

const columnOf = (header) => header.findIndex((name) => FIELDS.includes(name.trim().toLowerCase()));
// A sentence with commas is no header: a name has no spaces. Neither is a paragraph of one word.
function isHeader(text) {
  const [line] = text.trimStart().split("\n");
  const unquoted = text.trim().replace(/"[^"]*"/gu, "");
  return !/\S\s+\S/u.test(line.replaceAll(",", "")) && columnOf(readCsv(line).head?.cells ?? []) >= 0
    && (line.includes(",") || (unquoted.includes("\n") && !BLANK_LINES.test(unquoted)));
}

function readRows(text) {
  const { head: { cells: header }, rows, wrong: [wrong] } = readCsv(text);
  if (wrong) throw problem(`line ${wrong.line} of the passages: ${wrong.sentence}`);
  const [column, ids] = [columnOf(header), header.findIndex((name) => name.trim().toLowerCase() === "id")];
  return rows.map(({ cells }) => ({ text: cells[column], id: idOf(cells[ids]) }));
}

// Fields that change scores, and that this view does not send.
const REFUSED = ["instruction", "max_tokens_per_query", "max_tokens_per_doc"];
// Parts of `chunking` that it sends.
const CHUNKING = ["size", "overlap"];

// The query and the passages of the body of a request to /rerank or /score, and the options that change scores.
export function readRequest(json) {
  let body;
  try {
    body = parsed(json);
  } catch {
    throw problem("the request in the URL is not JSON");
  }
  const [query, ...others] = [body?.query ?? body?.queries].flat();
  const texts = Array.isArray(body?.documents) ? body.documents : [body?.documents];
  const passages = texts.map((item) => ({ text: item?.text ?? item, id: idOf(item?.id) }));
  if (typeof query !== "string" || passages.some(({ text }) => typeof text !== "string")) {
    throw problem("the request in the URL needs the fields query and documents, as a body of /rerank");
  }
  if (others.length) throw problem("the request in the URL has several queries; this view ranks by one");
  const isSet = (value) => (value ?? null) !== null;
  const { strategy = "tokens", ...chunking } = body.chunking ?? {};
  const refused = [
    ...REFUSED.filter((field) => isSet(body[field])),
    ...(strategy === "tokens" ? [] : ["chunking.strategy"]),
    ...Object.keys(chunking).filter((field) => !CHUNKING.includes(field) && chunking[field]).map((field) => `chunking.${field}`),
  ];
  if (refused.length) throw problem(`the request in the URL has ${listed(refused)}, without which this view would show other scores than the request`);
  const divided = body.chunking ? { size: chunking.size ?? "", overlap: chunking.overlap ?? 0 } : {};
  return { query, passages, model: body.model, options: { ...divided, ...(body.prompt_name && { prompt: body.prompt_name }) } };
}

// The edits of a ranking in a URL: options as texts, edited passages and struck units by index; null: they are not such.
export function readEdits(json) {
  try {
    const { query, texts = [], struck = [], ...options } = JSON.parse(json);
    return {
      query, texts: texts.map(([index, text]) => [index, String(text)]), struck: struck.map(([index, units]) => [index, new Set(units)]),
      ...Object.fromEntries(Object.entries(options).map(([name, value]) => [name, String(value)])),
    };
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
    return null;
  }
}
