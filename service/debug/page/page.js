// The page: inputs, tabs, runs and their results.

import { element, lamp, shown } from "./dom.js";
import { ask, curl, MODEL, modelNames, Problem } from "./request.js";
import { DEFAULTS, SECTIONS } from "./sections.js";

const KEY = "vitrine-key";
const DRY_RUN_AFTER_MS = 400;

const byId = (id) => document.getElementById(id);
const named = [...document.querySelectorAll("[name]:not(meta)")];
const tabs = [...document.querySelectorAll("[role=tab]")];
const defaults = inputs();
const shownRuns = {};
// The capabilities of the served model; null until they have arrived.
let model = null;
let current = "attribute";
let costTimer;
let costs = new AbortController();

function inputs() {
  const values = {};
  for (const { name, type, value, checked } of named) {
    if (type === "checkbox") values[name] = [...(values[name] ?? []), ...(checked ? [value] : [])];
    else if (type !== "radio" || checked) values[name] = value;
  }
  return values;
}

// The URL fragment contains every input except the API key, so that the URL can be shared.

function writeAddress() {
  const address = new URLSearchParams({ tab: current });
  for (const [name, value] of Object.entries(inputs())) {
    if (String(value) !== String(defaults[name])) address.set(name, value);
  }
  history.replaceState(null, "", `#${address}`);
}

function readAddress() {
  const address = new URLSearchParams(location.hash.slice(1));
  for (const input of named) {
    const value = address.get(input.name) ?? String(defaults[input.name]);
    if (["checkbox", "radio"].includes(input.type)) input.checked = value.split(",").includes(input.value);
    else setValue(input, value);
  }
  const tab = address.get("tab");
  show(Object.hasOwn(SECTIONS, tab) && !byId(`tab-${tab}`).hidden ? tab : "attribute");
}

function setValue(input, value) {
  // The choices are unknown until the request for the capabilities has returned.
  if (input.dataset.choices && value && ![...input.options].some((option) => option.value === value)) {
    input.append(element("option", {}, value));
  }
  input.value = value;
  if (input.selectedIndex === -1) input.value = defaults[input.name];
}

function show(name) {
  current = name;
  for (const tab of tabs) {
    const chosen = tab.id === `tab-${name}`;
    tab.ariaSelected = String(chosen);
    tab.tabIndex = chosen ? 0 : -1;
    byId(tab.id.replace("tab-", "")).hidden = !chosen;
  }
  changed();
  redraw(name);
}

function changed() {
  const values = inputs();
  for (const label of document.querySelectorAll("[data-when]")) {
    const [name, choices] = label.dataset.when.split("=");
    label.hidden = !choices.split("|").includes(values[name]);
  }
  clearTimeout(costTimer);
  costTimer = setTimeout(showCost, DRY_RUN_AFTER_MS);
}

async function showCost() {
  const name = current;
  const { path, bodies, hasCost } = SECTIONS[name];
  if (!hasCost || model === null) return;
  costs.abort();
  costs = new AbortController();
  const say = (sentence, isProblem) => {
    part(name, "cost").textContent = sentence;
    part(name, "cost").classList.toggle("failed", isProblem);
  };
  try {
    const results = await Promise.all(
      bodies(inputs(), model).map((body) => ask(path, { ...body, dry_run: true }, byId("key").value, costs.signal)));
    say(results.length ? costSentence(results.map(({ cost }) => cost)) : "", false);
  } catch (error) {
    if (error.name !== "AbortError") say(problemSentence(error), true);
  }
}

function costSentence(costs) {
  const count = (number) => number.toLocaleString("en");
  const steps = costs.map(({ token_steps: number }) => count(number)).join(" + ");
  return `${steps} of ${count(costs[0].limit)} token steps${costs.length > 1 ? " each" : ""}`;
}

const part = (name, className) => byId(name).querySelector(`.${className}`);

function prepare(name, { button }) {
  byId(name).append(byId("run").content.cloneNode(true));
  part(name, "go").textContent = button;
  part(name, "go").disabled = true;
  part(name, "go").addEventListener("click", () => run(name));
  part(name, "copy").addEventListener("click", () => copy(name));
}

async function run(name) {
  const { path, bodies, nothing } = SECTIONS[name];
  const [key, requests, controller] = [byId("key").value, bodies(inputs(), model), new AbortController()];
  const cancel = part(name, "cancel");
  const started = performance.now();
  const seconds = () => `${((performance.now() - started) / 1000).toFixed(1)} s`;
  const clock = setInterval(() => { part(name, "elapsed").textContent = seconds(); }, 100);
  cancel.onclick = () => controller.abort();
  begin(name, requests.length ? "" : nothing);
  shownRuns[name] = [];
  try {
    part(name, "curl").dataset.command = requests.map((body) => curl(path, body, key !== "")).join("\n");
    part(name, "copy").hidden = !requests.length;
    for (const body of requests) {
      const result = await ask(path, body, key, controller.signal);
      shownRuns[name].push({ body, result });
      redraw(name);
    }
    part(name, "elapsed").textContent = `took ${seconds()}`;
  } catch (error) {
    part(name, "elapsed").textContent = "";
    part(name, "problem").textContent = problemSentence(error);
  } finally {
    clearInterval(clock);
    part(name, "go").disabled = false;
    cancel.hidden = true;
    byId(name).ariaBusy = "false";
  }
}

function begin(name, problem) {
  part(name, "go").disabled = true;
  part(name, "cancel").hidden = false;
  part(name, "problem").textContent = problem;
  part(name, "curl").hidden = true;
  part(name, "result").replaceChildren();
  byId(name).ariaBusy = "true";
}

function problemSentence(error) {
  if (error.name === "AbortError") return "Cancelled: the service has stopped the job.";
  if (error instanceof Problem) return error.message;
  console.error(error);
  return "Internal error of this page; see the browser's console.";
}

function redraw(name) {
  const runs = shownRuns[name] ?? [];
  drawLamps(runs.map(({ result }) => result));
  if (!runs.length) return;
  const warnings = [...new Set(runs.flatMap(({ result }) => result.warnings))];
  part(name, "result").replaceChildren(
    ...warnings.map((warning) => element("p", { className: "warning" }, `Warning: ${warning}.`)),
    ...SECTIONS[name].draw(runs, inputs(), model));
}

// Show the checks of the latest run in the current section.
function drawLamps(results) {
  const parities = results.flatMap(({ parity }) => parity ?? []);
  const integrals = results.flatMap(({ completeness }) => completeness ?? []);
  const finite = results.every(({ nonfinite }) => !nonfinite.length);
  const converged = integrals.every((integral) => integral.converged);
  byId("lamps").replaceChildren(
    lamp("Parity", parities.length ? parities.every(({ agrees }) => agrees) : null,
      parities.length ? paritySentence(parities) : "not run"),
    lamp("Completeness", integrals.length ? converged : null,
      integrals.length ? (converged ? "converged" : "not converged") : "not run"),
    lamp("Finite", results.length ? finite : null, results.length ? (finite ? "all numbers" : "some are NaN or ∞") : "not run"));
}

function paritySentence(parities) {
  if (["embedding", "multi"].includes(model.kind)) return `cosine ${shown(Math.min(...parities.map(({ cosine }) => cosine)), 6)}`;
  return `difference ${shown(Math.max(...parities.map(({ max_abs: difference }) => difference)))}`;
}

async function copy(name) {
  const curl = part(name, "curl");
  curl.textContent = curl.dataset.command;
  curl.hidden = false;
  // Outside secure contexts, browsers offer no clipboard: show the command, so that it can be selected.
  const copied = await navigator.clipboard?.writeText(curl.dataset.command).then(() => true, () => false);
  part(name, "copy").textContent = copied ? "Copied" : "Copy as curl";
}

async function showCapabilities() {
  try {
    const values = await ask("capabilities", null, byId("key").value);
    byId("unavailable").textContent = "";
    byId("model").textContent = `${values.model.name} (${values.kind}) on ${values.device}, torch ${values.torch}`;
    const isFirst = model === null;
    model = values;
    showChoices();
    if (isFirst) showKind();
    for (const button of document.querySelectorAll(".go")) button.disabled = false;
  } catch (error) {
    byId("model").textContent = "";
    byId("unavailable").textContent = problemSentence(error);
  }
  await showModels();
}

// With several models, link to the page of each.
async function showModels() {
  const names = await modelNames(byId("key").value);
  if (names.length < 2) return;
  byId("models").replaceChildren(...names.map((name) => element(
    "a", { href: `debug?model=${encodeURIComponent(name)}`, aria: { current: name === (MODEL ?? model?.model.name) } }, name)));
}

function showChoices() {
  for (const select of document.querySelectorAll("[data-choices]")) {
    const { value } = select;
    const none = select.dataset.none ? [element("option", { value: "" }, select.dataset.none)] : [];
    select.replaceChildren(...none, ...model[select.dataset.choices].map((choice) => element("option", {}, choice)));
    setValue(select, value);
  }
}

// Show the sections and inputs that the kind of model has, with its initial values.
function showKind() {
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(model.kind);
  for (const tab of tabs) tab.hidden = !model.routes.includes(SECTIONS[tab.id.replace("tab-", "")].path);
  for (const option of document.querySelectorAll("[name=target] option")) {
    if (!model.targets.includes(option.value)) option.remove();
  }
  byId("target").hidden = model.targets.length === 1;
  Object.assign(defaults, DEFAULTS[model.kind]);
  readAddress();
}

function turn(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const open = tabs.filter(({ hidden }) => !hidden);
  const tab = open[(open.indexOf(event.target) + step + open.length) % open.length];
  tab.focus();
  tab.click();
}

for (const [name, section] of Object.entries(SECTIONS)) prepare(name, section);
for (const tab of tabs) {
  tab.addEventListener("click", () => { show(tab.id.replace("tab-", "")); writeAddress(); });
  tab.addEventListener("keydown", turn);
}
for (const input of named) input.addEventListener("input", () => { changed(); writeAddress(); });
part("attribute", "result").before(byId("units"));
byId("units").addEventListener("input", () => redraw("attribute"));
addEventListener("hashchange", readAddress);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(current));
byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value);
  showCapabilities();
  changed();
});
readAddress();
showCapabilities();
