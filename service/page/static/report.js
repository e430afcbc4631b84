// Results as files: a picture, and a report that needs no service.

import { byId, element, muted } from "./dom.js";
import { Problem } from "./request.js";
import { part, state } from "./state.js";

export function download(name, type, content) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

// The page's styles, with the colours as they are now, whatever scheme a reader prefers.
function styles() {
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]);
  const names = rules.filter(({ selectorText }) => selectorText === ":root").flatMap(({ style }) => [...style]).filter((name) => name.startsWith("--"));
  const now = getComputedStyle(document.documentElement);
  const colours = [...new Set(names)].map((name) => `${name}: ${now.getPropertyValue(name)};`).join(" ");
  const scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  return `${rules.map(({ cssText }) => cssText).join("\n")}\n:root { color-scheme: ${scheme} !important; ${colours} }`;
}

// A copy that does nothing: without the controls, which need the page's scripts.
function copyOf(result) {
  const copy = result.cloneNode(true);
  for (const control of copy.querySelectorAll("input, .readout, .partners, .slot")) control.remove();
  for (const unit of copy.querySelectorAll("[role=button]")) unit.removeAttribute("role");
  for (const named of copy.querySelectorAll("[tabindex]")) named.removeAttribute("tabindex");
  for (const button of copy.querySelectorAll("button:is(.sort, .link)")) button.replaceWith(button.textContent);
  for (const button of copy.querySelectorAll("button.chip")) button.replaceWith(stillChip(button));
  return copy;
}

function stillChip(button) {
  const isStruck = button.ariaPressed === "true";
  const chip = element("span", { className: `${button.className}${isStruck ? " struck" : ""}` }, ...button.childNodes);
  chip.style.cssText = button.style.cssText;
  return chip;
}

// A copy of a section's result, and of the effects of edits.
function contents(name) {
  const result = part(name, "result");
  return [copyOf(result), ...[...result.querySelectorAll(".outcome")].flatMap((outcome) =>
    [element("h2", {}, "What if the text were different?"), copyOf(outcome)])];
}

// `values`: the inputs that the results are of. `record`: the requests and responses, as JSON.
export function reportOf(name, values, record, link) {
  const file = document.implementation.createHTMLDocument(`Vitrine: ${document.querySelector(`#tab-${name}`).textContent}`);
  const heading = document.querySelector(`#${name} h2`).innerText;
  const texts = [...document.querySelectorAll(".texts label, .stated")].filter(({ offsetParent }) => offsetParent)
    .map((label) => [label.querySelector(".name:not([hidden])").textContent, values[label.querySelector("textarea, input, select").name]]);
  const policy = element("meta", { httpEquiv: "Content-Security-Policy", content: "default-src 'none'; style-src 'unsafe-inline'; img-src data:" });
  const data = element("script", { type: "application/json", id: "data", textContent: record.replaceAll("<", "\\u003c") });
  file.documentElement.lang = "en";
  file.body.className = "still";
  file.head.prepend(element("meta", { content: "width=device-width, initial-scale=1", name: "viewport" }));
  file.head.prepend(policy);
  const charset = element("meta");
  charset.setAttribute("charset", "utf-8");
  file.head.prepend(charset);
  file.head.append(element("style", { textContent: styles() }));
  file.body.append(element("main", {},
    element("h1", {}, heading),
    muted(`${byId("model").textContent}. `, element("a", { href: link }, "Open in the service")),
    element("dl", { className: "facts" }, ...texts.filter(([, value]) => value).map(([label, value]) =>
      element("div", {}, element("dt", {}, label), element("dd", {}, value)))),
    part(name, "lamps").cloneNode(true),
    ...contents(name),
    muted(`Model ${state.model.info.identity}; requests and responses are in this file, in the element “data”.`)), data);
  return `<!doctype html>\n${file.documentElement.outerHTML}`;
}

// Characters that XML does not have, such as the form feeds of PDFs.
const NOT_IN_XML = /[^\t\n\r\x20-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu;

// Draw a copy of a section's result, in an SVG image, on a canvas.
export async function pictureOf(name) {
  const w = Math.ceil(part(name, "result").getBoundingClientRect().width) + 48;
  const body = element("body", { className: "still", style: { margin: "0", "max-width": "none", width: `${w}px` } },
    element("style", { textContent: styles() }), ...contents(name));
  const markup = new XMLSerializer().serializeToString(body).replace(NOT_IN_XML, " ");
  const h = heightOf(w, body.childNodes);
  const svg = `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}"><foreignObject width="100%" height="100%">${markup}</foreignObject></svg>`;
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = element("canvas", { width: 2 * w, height: 2 * h });
  const context = canvas.getContext("2d");
  context.scale(2, 2);
  context.drawImage(image, 0, 0);
  const picture = await new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
  if (!picture) throw new Problem("The result is too large for a picture in this browser; the HTML report has it too");
  return picture;
}

// The height of nodes at a width, measured in the page, which does not show them.
function heightOf(width, nodes) {
  const box = element("div", { className: "still", style: { position: "absolute", visibility: "hidden", width: `${width}px` } },
    ...[...nodes].filter(({ tagName }) => tagName !== "STYLE").map((node) => node.cloneNode(true)));
  document.body.append(box);
  const { height } = box.getBoundingClientRect();
  box.remove();
  return Math.ceil(height);
}
