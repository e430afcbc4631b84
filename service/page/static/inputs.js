// The inputs of the page, and their values in its URL.

import { byId, element } from "./dom.js";

const named = [...document.querySelectorAll("[name]:not(meta)")];
const defaults = inputs();
const isLocal = ({ dataset }) => "local" in dataset;

export function inputs() {
  const values = {};
  for (const { name, type, value, checked } of named) {
    if (type === "checkbox") values[name] = [...(values[name] ?? []), ...(checked ? [value] : [])];
    else if (type !== "radio" || checked) values[name] = value;
  }
  return values;
}

export function onInput(listener) {
  for (const input of named) input.addEventListener(input.tagName === "SELECT" ? "change" : "input", () => listener(input));
}

// Every input that differs from its default, except the API key, which has no name, and lists that are too long for a
// URL. An edited text starts as the text itself.
export function changedInputs(values = inputs()) {
  const initial = { ...defaults, "edited-a": values.a, "edited-b": values.b };
  return Object.entries(values).filter(([name, value]) => !isLocal(inputOf(name)) && String(value) !== String(initial[name]) && !(name.startsWith("edited-") && value === ""));
}

export function restore(address) {
  for (const input of named.filter((own) => !isLocal(own))) {
    const value = address.get(input.name) ?? String(defaults[input.name]);
    if (["checkbox", "radio"].includes(input.type)) input.checked = value.split(",").includes(input.value);
    else setValue(input, value);
  }
}

export function setValue(input, value) {
  // The choices are unknown until the model's description has arrived.
  if (input.tagName === "SELECT" && value && ![...input.options].some((option) => option.value === value)) {
    input.append(element("option", { value }, value));
  }
  input.value = value;
  if (input.selectedIndex === -1) input.value = defaults[input.name];
}

// Set an input as if it was typed.
export function setInput(name, value) {
  const input = inputOf(name);
  input.value = value;
  input.dispatchEvent(new Event("input", { bubbles: true }));
}

// Show the parts whose condition holds, such as `data-when="target=dim"`; those of `data-unless` if it does not.
export function showConditional() {
  const values = inputs();
  for (const part of document.querySelectorAll("[data-when], [data-unless]")) {
    const [name, choices] = (part.dataset.when ?? part.dataset.unless).split("=");
    part.hidden = choices.split("|").includes(values[name]) !== ("when" in part.dataset);
  }
}

// The choices of what the model has, such as labels or layers.
export function showChoices(choicesOf) {
  for (const select of document.querySelectorAll("[data-choices]")) {
    const { value } = select;
    const none = select.dataset.none ? [element("option", { value: "" }, select.dataset.none)] : [];
    const choices = choicesOf[select.dataset.choices];
    if (!choices) continue;
    select.replaceChildren(...none, ...choices.map((choice) => element("option", { value: choice }, choice)));
    setValue(select, value);
  }
}

// Show the inputs that a kind of model has, with its initial values.
export function showKind(kind, initial) {
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(kind);
  Object.assign(defaults, initial);
}

// Offer the targets of the gradient routes; the initial one is the first.
export function showTargets({ similarity, gradients: { targets } }) {
  const select = inputOf("target");
  const isInitial = select.value === defaults.target;
  for (const option of [...select.options]) {
    const isCosine = option.value === "similarity" && similarity === "cosine"; // two names of one target
    if (isCosine || !targets.includes(option.value)) option.remove();
  }
  byId("target").hidden = targets.length === 1;
  [defaults.target] = targets;
  if (isInitial || select.selectedIndex === -1) select.value = defaults.target;
}

const inputOf = (name) => named.find((input) => input.name === name);

export function labelOf(name) {
  const label = inputOf(name).closest("label");
  return [...label.querySelectorAll(".name")].find(({ hidden }) => !hidden).textContent;
}

// Mark the input that a problem is about, or none; `sentence` is the element with the message.
export function markInvalid(name, sentence) {
  for (const input of named.filter(({ dataset }) => dataset.problem === sentence.id)) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    delete input.dataset.problem;
  }
  if (name === null) return;
  const input = inputOf(name);
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", sentence.id);
  input.dataset.problem = sentence.id;
  input.closest("details")?.setAttribute("open", "");
}

export const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

// Numbers of a line may be separated by white space, commas, semicolons and square brackets.
export const vectors = (text) => lines(text).map((line) => line.split(/[\s,;[\]]+/).filter(Boolean).map(Number));
