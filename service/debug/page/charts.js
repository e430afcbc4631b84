// Charts, where the library is there; a sentence where it is not.

import { element } from "./dom.js";

let library;

// Some megabytes, which the first chart is early enough for.
function loaded() {
  library ??= new Promise((resolve) => {
    const script = element("script", { src: "debug/assets/plotly.min.js" });
    script.onload = () => resolve(true);
    script.onerror = () => resolve(false);
    document.head.append(script);
  });
  return library;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function divergingScale() {
  return ["low", "low-half", "neutral", "high-half", "high"].map((name, place) => [place / 4, colour(name)]);
}

// The library reads some tags and entities in labels; a text means neither.
export function label(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

export function chart(description, height, traces, layout) {
  const place = element("div", { className: "chart", role: "img", style: { "min-height": `${height}px` }, aria: { label: description } });
  draw(place, height, traces, layout);
  return place;
}

async function draw(place, height, traces, layout) {
  if (!(await loaded())) {
    place.style.removeProperty("min-height");
    place.replaceChildren("The chart library is not installed: pip install 'vitrine[twin]' brings it.");
    return;
  }
  // A redraw, or a hidden section, may have taken the place away by now.
  if (!place.isConnected) return;
  const axis = { gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  const { xaxis, yaxis, ...others } = layout;
  await globalThis.Plotly.newPlot(place, traces, {
    height,
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
    hoverlabel: { align: "left" },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...others,
  }, { displayModeBar: false, responsive: true });
}
