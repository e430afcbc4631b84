// The page: entries, tabs, models, and what happens when an input changes.

import { check, checkSoon } from "./cost.js";
import { byId, sentenceCase } from "./dom.js";
import { showEntriesSoon } from "./entries.js";
import { connectEvaluation } from "./evaluation.js";
import { connectExports } from "./export.js";
import { changedInputs, inputs, onInput, restore, showChoices, showConditional, showKind, showTargets } from "./inputs.js";
import { HAS_GRADIENTS, loadGradients, servedModel } from "./model.js";
import { showModels } from "./models.js";
import { DEFAULTS } from "./questions.js";
import { connectRanking, openLinkedRequest } from "./rank_page.js";
import { Problem } from "./request.js";
import { checkStale } from "./results.js";
import { isOfBrowser } from "./roving.js";
import { onResults, redraw, run, runSecond } from "./runs.js";
import { SECTIONS } from "./sections.js";
import { key, part, sections, state } from "./state.js";
import { connectWhatIf, showWhatIf } from "./whatif.js";

const KEY = "vitrine-key";
const CHEAP = 50_000; // token steps of gradients up to which the result of a URL is computed again

const tabs = [...document.querySelectorAll("[role=tab]")];
const nameOf = (tab) => tab.id.replace("tab-", "");

// The URL's fragment has every input, the section and whether it has run. The key is never in it.
function writeAddress() {
  const { current } = state;
  const address = new URLSearchParams({ tab: current, ...Object.fromEntries(changedInputs()) });
  if (sections[current].runs.length) address.set("run", "1");
  history.replaceState(null, "", `#${address}`);
}

function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  restore(address);
  const tab = address.get("tab");
  show(Object.hasOwn(SECTIONS, tab) && isOffered(tab) ? tab : isOffered("rank") ? "rank" : "explain");
}

// Whether the model has a section. Those of gradients are offered until it is known that there are none.
function isOffered(name) {
  const { kinds, route } = SECTIONS[name];
  const { model } = state;
  if (kinds && model && !kinds.includes(model.kind)) return false;
  return !route || (HAS_GRADIENTS && !model?.problem && (!model?.gradients || model.gradients.routes.includes(route)));
}

function isReady(name) {
  const { route, isOfTwo } = SECTIONS[name];
  return state.model !== null && (!route || state.model.gradients !== null) && (!isOfTwo || document.querySelector("[name=other]").length > 0);
}

function showTabs() {
  for (const tab of tabs) tab.hidden = !isOffered(nameOf(tab));
  byId("entries").hidden = !tabs.some((tab) => !tab.hidden && SECTIONS[nameOf(tab)].entry === "defect");
  for (const name of Object.keys(SECTIONS)) part(name, "go").disabled = !isReady(name) || sections[name].isRunning;
}

// Results of a URL, and of the example, are computed at once if they are cheap.
async function runAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  const name = state.current;
  const isAsked = address.has("run") || (location.hash === "" || !address.has("tab"));
  if (!isAsked || !isReady(name) || !SECTIONS[name].isCheap) return;
  const cost = SECTIONS[name].hasDryRun ? await check(name) : 0;
  if (cost !== null && cost <= CHEAP) await run(name);
}

function show(name) {
  state.current = name;
  const { entry } = SECTIONS[name];
  for (const button of document.querySelectorAll("button[data-entry]")) button.ariaPressed = String(button.dataset.entry === entry);
  for (const list of document.querySelectorAll("[role=tablist]")) list.hidden = list.dataset.entry !== entry;
  for (const tab of tabs) {
    const chosen = nameOf(tab) === name;
    tab.ariaSelected = String(chosen);
    tab.tabIndex = chosen ? 0 : -1;
    byId(nameOf(tab)).hidden = !chosen;
  }
  changed();
}

function changed() {
  showConditional();
  document.querySelector(".texts").dataset.uses = SECTIONS[state.current].uses?.(inputs()) ?? "all";
  checkStale(state.current);
  checkSoon(state.current);
  if (state.current === "attribute" && state.model?.kind === "sparse") showEntriesSoon(inputs().a, key());
}

function prepare(name, { button }) {
  byId(name).append(byId("run").content.cloneNode(true));
  part(name, "go").textContent = button;
  part(name, "go").addEventListener("click", () => run(name));
  part(name, "cancel").addEventListener("click", () => sections[name].controller?.abort());
  connectExports(name);
}

// The last call of showModel: a slower answer to an earlier one, as for another key, is dropped.
let lastCall = null;

// The first answer needs the serving process alone; gradients are added when their process has started.
async function showModel() {
  const call = lastCall = {};
  const isLast = () => call === lastCall;
  try {
    const model = await servedModel(key());
    if (!isLast()) return;
    const isFirst = state.model === null;
    state.model = model;
    byId("unavailable").textContent = "";
    byId("model").textContent = `${model.name} (${model.kind}) on ${model.info.engine}, ${model.info.precision}`;
    if (model.kind === "tags") {
      showUnexplained();
      return await showModels(isLast);
    }
    showChoices(model);
    showKind(model.kind, DEFAULTS[model.kind]);
    document.body.dataset.kind = model.kind;
    showTabs();
    if (isFirst) readAddress();
    await Promise.all([showModels(isLast).then(showTabs), isFirst && runAddress(), HAS_GRADIENTS && showGradients(model)]);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (!isLast()) return;
    byId("model").textContent = "";
    byId("key").closest("details").open ||= error.needsKey;
    byId("unavailable").textContent = sentenceCase(`${error.message}.`);
    await showModels(isLast);
  }
}

async function showGradients(model) {
  await loadGradients(model, key());
  if (state.model !== model) return;
  if (model.gradients) {
    showChoices(model.gradients);
    showTargets(model);
  }
  byId("second-options").hidden = !model.gradients || model.kind === "sparse";
  showTabs();
  if (!isOffered(state.current)) show("explain");
  changed();
  await Promise.all([runSecond("explain"), sections[state.current].runs.length || sections[state.current].isRunning || runAddress()]);
}

function showUnexplained() {
  byId("unexplained").hidden = false;
  for (const part of document.querySelectorAll("#entries, [role=tablist], .texts, [role=tabpanel]")) part.hidden = true;
}

function openEntry(entry) {
  const open = tabs.filter((tab) => !tab.hidden && SECTIONS[nameOf(tab)].entry === entry);
  show(nameOf(open.find((tab) => tab.dataset.last === "true") ?? open[0]));
  writeAddress();
}

function openTab(tab) {
  for (const other of tabs) if (SECTIONS[nameOf(other)].entry === SECTIONS[nameOf(tab)].entry) other.dataset.last = String(other === tab);
  show(nameOf(tab));
  writeAddress();
}

function turn(event) {
  const open = [...event.currentTarget.children].filter(({ hidden }) => !hidden);
  const at = open.indexOf(event.target);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
  if (next === undefined || isOfBrowser(event)) return;
  event.preventDefault();
  const tab = open.at(next % open.length);
  tab.focus();
  openTab(tab);
}

for (const [name, section] of Object.entries(SECTIONS)) prepare(name, section);
for (const tab of tabs) tab.addEventListener("click", () => openTab(tab));
for (const list of document.querySelectorAll("[role=tablist]")) list.addEventListener("keydown", turn);
for (const button of document.querySelectorAll("button[data-entry]")) button.addEventListener("click", () => openEntry(button.dataset.entry));
onInput(({ name }) => {
  if (["units", "hits-k"].includes(name)) redraw(state.current);
  else if (!name.startsWith("edited-")) changed();
  writeAddress();
});
onResults((name) => {
  if (name === "explain") showWhatIf(sections.explain.runs, sections.explain.inputs, state.model);
  if (name === state.current) writeAddress();
});
connectWhatIf(() => writeAddress());
connectEvaluation();
connectRanking();
// A link that is opened in the page itself.
addEventListener("hashchange", () => location.reload());
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && isReady(state.current)) run(state.current);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(state.current));
byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value);
  showModel();
  changed();
});
if (!openLinkedRequest()) {
  showTabs();
  readAddress();
  showModel();
}
