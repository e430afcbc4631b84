// Exports of a section's results: link, HTML report, picture, tables, requests and responses.

import { changedInputs, inputs } from "./inputs.js";
import { showProblem } from "./problems.js";
import { curl } from "./request.js";
import { download, pictureOf, reportOf } from "./report.js";
import { key, part, sections, state } from "./state.js";

export function connectExports(name) {
  for (const button of part(name, "exports").querySelectorAll("button")) {
    const { textContent: label, dataset } = button;
    button.addEventListener("click", async () => {
      try {
        button.textContent = (await EXPORTS[dataset.export](name)) ?? label;
      } catch (error) {
        showProblem(name, "problem", error);
      }
    });
  }
}

const EXPORTS = {
  link: (name) => copy(name, link(name)),
  curl: (name) => copy(name, sections[name].runs.map(({ path, body }) => curl(path, body, key() !== "")).join("\n")),
  json: (name) => download(`vitrine-${name}.json`, "application/json", record(name, 1)),
  csv: (name) => download(`vitrine-${name}.csv`, "text/csv", csv(name)),
  picture: async (name) => download(`vitrine-${name}.png`, "image/png", await pictureOf(name)),
  report: (name) => {
    // The fields may have been changed since the run.
    const values = part(name, "stale").hidden ? inputs() : sections[name].inputs;
    download(`vitrine-${name}.html`, "text/html", reportOf(name, values, record(name), link(name, values)));
  },
};

// The page's URL with the model's name, which is not in the URL of the default model.
function link(name, values = inputs()) {
  const url = new URL(location.href);
  url.search = `?model=${encodeURIComponent(state.model.name)}`;
  url.hash = String(new URLSearchParams({ tab: name, ...Object.fromEntries(changedInputs(values)), run: "1" }));
  return url.href;
}

// JSON has no NaN and infinities: they become texts. Bytes of tensors are left out.
const finite = (value) => {
  if (typeof value === "number" && !Number.isFinite(value)) return String(value);
  return value instanceof ArrayBuffer ? `${value.byteLength} bytes` : value;
};

// The requests and responses as JSON.
function record(name, indent) {
  const runs = sections[name].runs.map(({ path, body, result, problem }) => ({ path, request: body, response: result, problem }));
  return JSON.stringify({ model: state.model.info, runs }, (_, value) => finite(value), indent);
}

// All tables of a result, with exact numbers; an empty line is between two tables.
function csv(name) {
  return [...part(name, "result").querySelectorAll("table")].map((table) => [
    [table.caption.textContent],
    ...[...table.rows].map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent)),
  ].map((row) => row.map(quoted).join(",")).join("\r\n")).join("\r\n\r\n");
}

// A spreadsheet would compute a text that starts like a formula.
function quoted(value) {
  const safe = /^[=+\-@\t]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

async function copy(name, text) {
  part(name, "curl").textContent = text;
  part(name, "curl").hidden = false;
  // Outside secure contexts, browsers offer no clipboard: the text is shown, so that it can be selected.
  const copied = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  return copied ? "Copied" : undefined;
}
