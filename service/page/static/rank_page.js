// The ranking view: its inputs, files, links, and what the buttons of its rows do.

import { byId, element } from "./dom.js";
import { connectFiles } from "./files.js";
import { inputs, setInput } from "./inputs.js";
import { drawExpected, expectedRequests } from "./rank_expected.js";
import { openRanking } from "./rank_open.js";
import { readPassages, readRequest, writePassages } from "./rank_passages.js";
import { rankingOf } from "./rank.js";
import { edit, openEditor, showEdits, showRankingEdits, strike, undo, undoAll, update } from "./rank_whatif.js";
import { ask, Problem } from "./request.js";
import { onResults, redraw, run } from "./runs.js";
import { showProblem } from "./problems.js";
import { key, sections, state } from "./state.js";

const view = byId("rank");
let comparison = new AbortController();

const ACTIONS = {
  expect: (button) => expect(button.closest(".row").dataset.index),
  unexpect: () => expect(""),
  edit: openEditor,
  undo: (button) => {
    undo(Number(button.closest(".row").dataset.index));
    button.closest(".row").querySelector("[data-action=edit]").focus();
  },
  strike,
  explain: (button) => explain(Number(button.closest(".row").dataset.index)),
  "undo-all": () => {
    undoAll();
    view.querySelector("[data-option=query]").focus();
  },
  add: addMissing,
};

function expect(index) {
  setInput("expected", index);
  redraw("rank");
  const row = view.querySelector(".row.expected");
  (row ?? view.querySelector(".row"))?.querySelector("[data-action$=expect]").focus();
}

// The passage that a search did not return.
function addMissing() {
  const missing = byId("missing");
  const text = missing.value.trim();
  if (!text) return missing.focus();
  try {
    const passages = readPassages(inputs().passages);
    openRanking(inputs().query, [...passages, { text, id: null }], passages.length);
    missing.value = "";
  } catch (error) {
    showProblem("rank", "problem", error);
  }
}

// Open the detailed view of one passage.
function explain(index) {
  const { query, passages } = rankingOf(sections.rank.runs);
  for (const [name, value] of [["a", query], ["b", passages[index].text], ["c", ""]]) setInput(name, value);
  byId("tab-explain").click();
  byId("tab-explain").focus();
  run("explain");
}

// Compare the expected passage with the first one, in a place of the result of its own.
async function compare() {
  comparison.abort();
  const ranking = rankingOf(sections.rank.runs);
  const place = view.querySelector(".why");
  const { expected } = inputs();
  if (!ranking || expected === "" || !ranking.passages[expected]) return;
  comparison = new AbortController();
  const index = Number(expected);
  const { runs } = sections.rank;
  const known = (request) => runs.find(({ body }) => JSON.stringify(body) === JSON.stringify(request.body));
  const compared = [];
  try {
    for (const request of expectedRequests(ranking, index, state.model)) {
      compared.push(known(request) ?? await answered(request));
    }
    place.replaceChildren(drawExpected(ranking, index, compared));
    sections.rank.runs.push(...compared.filter((request) => !known(request)));
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Problem)) throw error;
    place.replaceChildren(element("p", { className: "problem" }, `The comparison with the first passage: ${error.message}.`));
  }
}

async function answered(request) {
  try {
    return { ...request, result: await ask(request.path, request.body, key(), comparison.signal) };
  } catch (error) {
    if (!request.isOptional || !(error instanceof Problem)) throw error;
    return { ...request, problem: `The chunks behind the cut line could not be scored: ${error.message}.` };
  }
}

// Open the ranking of a URL with the body of a request to /rerank or /score, which loads the page again; whether it does.
export function openLinkedRequest() {
  const search = new URLSearchParams(location.search);
  const request = search.get("request");
  if (request === null) return false;
  try {
    const { query, passages, options, model = search.get("model") } = readRequest(request);
    const edits = Object.keys(options).length ? { "rank-edits": JSON.stringify(options) } : {};
    const address = new URLSearchParams({ tab: "rank", query, passages: writePassages(passages), ...edits, run: "1" });
    location.replace(`${location.pathname}${model ? `?model=${encodeURIComponent(model)}` : ""}#${address}`);
    return true;
  } catch (error) {
    history.replaceState(null, "", "#tab=rank");
    showProblem("rank", "problem", error);
    return false;
  }
}

export function connectRanking() {
  const act = (target) => {
    const control = target.closest("[data-action]");
    if (control) ACTIONS[control.dataset.action]?.(control);
  };
  view.addEventListener("click", ({ target }) => act(target));
  view.addEventListener("keydown", (event) => {
    if (event.target.matches(".unit") && ["Enter", " "].includes(event.key) && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      act(event.target);
    }
  });
  view.addEventListener("input", ({ target }) => {
    if (target.matches(".editor textarea")) edit(target);
    else if (target.matches("#rank-whatif [data-option]")) update();
    else if (["query", "passages"].includes(target.name)) sections.rank.controller?.abort();
    if (target.name === "passages") setInput("expected", "");
    if (["query", "passages"].includes(target.name) && !sections.rank.runs.length) setInput("rank-edits", "");
  });
  view.addEventListener("rank", () => run("rank"));
  view.addEventListener("painted", showEdits); // units that are struck out in the URL
  connectFiles("passages", byId("passages-file"), view.querySelector("[name=passages]"));
  onResults((name) => {
    if (name !== "rank") return;
    showRankingEdits();
    compare();
  });
}
